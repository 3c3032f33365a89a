"""`ngramspec verify`: check that drafting does not change the output of a model on this machine."""

from __future__ import annotations

import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

from ngramspec.data import encode
from ngramspec.drafting import DEFAULT
from ngramspec.instruments.prompts import load_prompts, prepare
from ngramspec.instruments.selfcheck.check import SelfCheck, list_checks, verify_report
from ngramspec.loading.load import find, open_alone, open_drafter
from ngramspec.loading.settings import LOADING, LoadSettings
from ngramspec.sampling.settings import allow_int_range, allow_range, option

from .conditions import Conditions, exact_mode, load_settings
from .console import fail, note, usage_errors
from .options import DISPLAY, PROMPTS, Model
from .show import Output, command_line, run_pieces

MODELS = ("draft_model", "gpu_layers_draft", "device_draft", "threads_draft", "mtp", "drafter")


def verify(
    load: Annotated[LoadSettings, (*LOADING, *MODELS)],
    output: Annotated[Output, ("as_json",)],
    model: Model = None,
    prompts: Path | None = PROMPTS,
    predict: int = option(64, "-n", help="Maximum number of tokens per text.", allowed=allow_range(2)),
    time_limit: float = option(
        50.0, help="Time for the checks in seconds, after loading.", allowed=allow_range(1, 86400)
    ),
    seed: int = option(0, "-s", help="Random seed.", allowed=allow_int_range(0, 2**32 - 1)),
) -> None:
    """Check that drafting does not change the output of a model on this machine.

    Logits after a rollback must be bit-identical to those before it. Texts with and without drafts must be equal for
    prompts of every category, at temperature 0 and at 0.8 with a fixed seed, including penalties and a grammar. Drafts
    of four tokens are always verified, even if they do not pay. They are made with knowledge of most of the plain text,
    so that many are accepted.

    Batches of different sizes can round logits differently. With --exact off, a text may differ if rounding explains
    it; the report shows the position, tokens, logits and the required change. With --exact on, everything must be
    bit-identical; with auto, only if it has chosen settings for that.

    The exit code is 1 if a check fails. The last line shows the result and lists checks skipped for lack of time.
    """
    output.check()
    # A memory that one run fills would change the next run.
    load = replace(load, no_memory=True)
    selection = load_prompts(prompts)
    files = find(model, load, DISPLAY)
    target = open_alone(files, load, DISPLAY)
    # Prompts of any length are allowed because they are cut to fit.
    cases, skipped_prompts = prepare(target.vocabulary, selection, predict, None)
    with usage_errors("-n/--predict: "):
        strict = target.exact == "on" or target.exactness.bit_identical
        drafter, _, _ = open_drafter(target, files, load, DISPLAY, learn=False)
        selfcheck = SelfCheck(
            target, cases, drafter=drafter or DEFAULT, max_tokens=predict, seconds=time_limit, seed=seed, exact=strict
        )
    if strict and selfcheck.kernels.exact_sizes is None and target.sequences[0].can_rollback:
        note("comparing the logits of batch sizes; this happens once per model, machine and settings")
    conditions = Conditions(target, files.label, load.exact)
    note(f"checking for up to {time_limit:g} seconds")
    outcome = run_pieces(selfcheck.run(), seconds=time_limit)
    checks = list_checks(selfcheck)
    own = {"--prompts": prompts, "-n": predict, "--time-limit": time_limit, "-s": seed}
    command = command_line("verify", [model], own, replace(load, no_memory=False))
    mode = exact_mode(selfcheck.kernels.exact_sizes) if strict else "default mode"
    limits = f"up to {predict} tokens per text, seed {seed}"
    setup = [*conditions.lines, f"{mode}; drafter {selfcheck.drafter}, drafts always verified; {limits}"]
    report = verify_report(command, setup, selfcheck, checks, skipped_prompts)
    document = {
        "selection": {"prompts": str(prompts) if prompts else None},
        **conditions.to_json(command, load),
        "complete": selfcheck.complete,
        "verdict": report.headline,
        "settings": {
            "drafter": selfcheck.drafter,
            "max_tokens": predict,
            "seconds": time_limit,
            "seed": seed,
            "exact": strict,
            "exact_sizes": selfcheck.kernels.exact_sizes,
            **load_settings(target),
        },
        "probe": encode(selfcheck.kernels.probe),
        "checks": [asdict(check) for check in checks],
        "texts": [_finite(asdict(pair)) for pair in selfcheck.pairs],
        "rollbacks": [_finite(asdict(test)) for test in selfcheck.rollbacks],
        "skipped": skipped_prompts,
    }
    output.write(report, document, outcome)
    failures = [f"{check.name} ({check.reason})" for check in checks if check.status == "failed"]
    if failures:
        fail(f"check failed: {'; '.join(failures)}")


def _finite(record: dict[str, Any]) -> dict[str, Any]:
    """Replace infinite numbers, which JSON does not support."""
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
