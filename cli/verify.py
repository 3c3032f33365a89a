"""`ngramspec verify`: check that drafting does not change the output of a model on this machine."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from ngramspec.data import encode
from ngramspec.drafting import DEFAULT
from ngramspec.instruments.prompts import SkippedPrompt, load_prompts, prepare
from ngramspec.instruments.selfcheck.check import SelfCheck
from ngramspec.instruments.selfcheck.report import Check, list_checks, verdict
from ngramspec.instruments.selfcheck.texts import TextDifference
from ngramspec.llama.target import Target
from ngramspec.loading.load import open_drafter
from ngramspec.loading.settings import LOADING, LoadSettings
from ngramspec.sampling.option import allow_int_range, allow_range, option

from .conditions import Conditions
from .console import defer_signals, fail, note, printable, reraise, usage_error
from .info import exact_mode, load_settings, provenance
from .options import PROMPTS, Model, find, flags_in_errors, open_target
from .output import Output, command_line, json_option
from .view import format_skipped, limit_lines, print_report, run_timed

MODELS = ("draft_model", "gpu_layers_draft", "device_draft", "threads_draft", "mtp", "drafter")


def verify(
    load: Annotated[LoadSettings, (*LOADING, *MODELS)],
    model: Model = None,
    prompts: Path | None = PROMPTS,
    predict: int = option(64, "-n", "--predict", help="Maximum number of tokens per text.", allowed=allow_range(2)),
    time_limit: float = option(
        50.0, help="Time for the checks in seconds, after loading.", allowed=allow_range(1, 86400)
    ),
    seed: int = option(0, "-s", "--seed", help="Random seed.", allowed=allow_int_range(0, 2**32 - 1)),
    as_json: str | None = json_option("all results"),
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
    # A memory that one run fills would change the next run.
    with flags_in_errors():
        load = replace(load, no_memory=True)
    selection = load_prompts(prompts)
    output = Output(as_json)
    files = find(model, load)
    target = open_target(files, load, head=load.mtp)
    # Prompts of any length are allowed because they are cut to fit.
    cases, skipped_prompts = prepare(target.vocabulary, selection, predict, None)
    try:
        strict = target.exact == "on" or target.exactness.bit_identical
        with defer_signals():
            drafter, _, _ = open_drafter(target, files, load, on_note=note, learn=False)
        selfcheck = SelfCheck(
            target, cases, drafter=drafter or DEFAULT, max_tokens=predict, seconds=time_limit, seed=seed, exact=strict
        )
    except ValueError as error:
        usage_error(f"-n/--predict: {error}")
    if strict and selfcheck.exact_sizes is None and target.sequences[0].can_rollback:
        note("comparing the logits of batch sizes; this happens once per model and machine")
    conditions = Conditions(target, files.label, load.exact)
    note(f"checking for up to {time_limit:g} seconds")
    outcome = run_timed(selfcheck.run(), selfcheck.seconds)
    checks = list_checks(selfcheck)
    own = {"--prompts": prompts, "-n": predict, "--time-limit": time_limit, "-s": seed}
    command = command_line("verify", [model], own, replace(load, no_memory=False))
    inputs = {
        "selection": {"prompts": str(prompts) if prompts else None},
        "load": asdict(load),
        "conditions": conditions.to_json(command),
    }
    details = [*_differences(selfcheck), *format_skipped(skipped_prompts), verdict(checks, complete=selfcheck.complete)]
    output.write(
        lambda: print_report([*conditions.lines, _heading(selfcheck), command, "", _table(checks), *details]),
        lambda: inputs | _document(target, selfcheck, checks, skipped_prompts),
    )
    failures = [f"{check.name} ({check.reason})" for check in checks if check.status == "failed"]
    if failures and outcome.error is None:
        fail(f"check failed: {'; '.join(failures)}")
    reraise(outcome)


def _heading(selfcheck: SelfCheck) -> str:
    drafts = f"drafter {selfcheck.drafter}, drafts always verified"
    limits = f"up to {selfcheck.max_tokens} tokens per text, seed {selfcheck.seed}"
    mode = exact_mode(selfcheck.exact_sizes) if selfcheck.exact else "default mode"
    return f"{mode}; {drafts}; {limits}"


def _document(
    target: Target, selfcheck: SelfCheck, checks: Sequence[Check], skipped_prompts: Sequence[SkippedPrompt]
) -> dict[str, Any]:
    return {
        **provenance(target),
        "complete": selfcheck.complete,
        "verdict": verdict(checks, complete=selfcheck.complete),
        "settings": {
            "drafter": selfcheck.drafter,
            "max_tokens": selfcheck.max_tokens,
            "seconds": selfcheck.seconds,
            "seed": selfcheck.seed,
            "exact": selfcheck.exact,
            "exact_sizes": selfcheck.exact_sizes,
            **load_settings(target),
        },
        "probe": encode(selfcheck.probe_report),
        "checks": [asdict(check) for check in checks],
        "texts": [_finite(asdict(pair)) for pair in selfcheck.pairs],
        "rollbacks": [_finite(asdict(test)) for test in selfcheck.rollbacks],
        "skipped": skipped_prompts,
    }


def _finite(record: dict[str, Any]) -> dict[str, Any]:
    """Replace infinite numbers, which JSON does not support."""
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}


# --------------------------------------------------------------------------- lines and a table

_STYLES = {"passed": "green", "explained": "yellow", "failed": "bold red", "skipped": "dim"}


def _table(checks: Sequence[Check]) -> Table:
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("check", no_wrap=True)
    table.add_column("result", no_wrap=True)
    table.add_column("requirement and coverage", overflow="fold")
    table.add_column("seconds", justify="right", no_wrap=True)
    for check in checks:
        lines = [printable(line) for line in (check.claim, check.covered, check.reason, check.missing) if line]
        duration = f"{check.seconds:.1f}" if check.seconds else "-"
        table.add_row(check.name, Text(check.status, _STYLES[check.status]), Text("\n".join(lines)), duration)
    return table


def _differences(selfcheck: SelfCheck) -> list[str]:
    pairs = [(pair, pair.difference) for pair in selfcheck.pairs if pair.difference is not None]
    lines = [
        f"{pair.category}/{pair.prompt}, {pair.setting}: after {difference.position} equal tokens, plain decoding has"
        f" {_token(difference.plain, difference.plain_text, difference.plain_logit)}, drafted"
        f" {_token(difference.drafted, difference.drafted_text, difference.drafted_logit)}; {_why(difference)}"
        for pair, difference in pairs
    ]
    return limit_lines(lines, "texts differ in total")


def _token(token: int | None, text: str, logit: float | None) -> str:
    return "no more tokens" if token is None else f"{token} {printable(repr(text))} (logit {logit:.4f})"


def _why(difference: TextDifference) -> str:
    if difference.needed is not None:
        need = "nothing" if difference.needed == 0 else f"{difference.needed:.2g}"
        return (
            f"a change of {need} in the logits explains it; the batch size changes them by up to {difference.bound:.2g}"
        )
    if difference.bound == 0:
        return "no batch size explains it"
    return f"the batch size changes logits by up to {difference.bound:.2g}, which does not explain it"
