"""`ngramspec verify`: whether drafting changes nothing on this model, build and machine."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated, Any

import typer

from ngramspec.drafting import DEFAULT
from ngramspec.llama.target import Target
from ngramspec.prompts import Skipped, load_prompts, prepare
from ngramspec.selfcheck.check import SelfCheck
from ngramspec.selfcheck.report import Check, report, verdict

from .about import exact_mode, load_settings, model_lines, provenance
from .console import Outcome, fail, guarded_stdout, leave, note, outcome, usage_error
from .draft_model import DraftModelOptions
from .json_output import JsonOutput, json_option
from .options import DrafterOrModel, LoadOptions, Model, PromptFiles
from .verify_view import show
from .view import timed_bar


def verify(
    load: LoadOptions,
    draft_model: DraftModelOptions,
    model: Model = None,
    drafter: DrafterOrModel = DEFAULT,
    prompts: PromptFiles = None,
    predict: Annotated[int, typer.Option("-n", "--predict", min=2, help="Most tokens per text.")] = 64,
    seconds: Annotated[
        float, typer.Option("--seconds", min=1, max=86400, help="Time for the checks, once the model is loaded.")
    ] = 50.0,
    seed: Annotated[int, typer.Option("-s", "--seed", min=0, max=2**32 - 1, help="Seed of all sampling.")] = 0,
    as_json: Annotated[str | None, json_option("all that was found")] = None,
) -> None:
    """Check on your model and machine that drafts change nothing.

    Logits after a rollback must be the same bits as before it. Plain and drafted texts of prompts of every category, at
    temperature 0 and of one seed at 0.8, with penalties and a grammar among them, must be equal. Drafts of four tokens
    are sent always, whether they pay or not.

    Batches of different sizes may give logits that differ in their last bits. With --exact off a text may differ where
    that explains it: position, tokens, logits and the movement needed are shown; with --exact on everything must be
    equal bit for bit, and with auto where it has chosen settings for that.

    Ends with exit code 1 if something that must hold does not; the last line says so, and what there was no time for.
    """
    draft_model.check_drafter(drafter)
    selected = load_prompts(prompts)
    with JsonOutput(as_json) as output:
        target = load.load(load.find(model), head=draft_model.mtp)
        # Prompts of any length: they will be cut to fit.
        cases, skipped = prepare(target, selected, predict, None)
        if not cases:
            first = skipped[0]
            fail(f"no prompt left of {len(selected)}; {first.category}/{first.id}: {first.reason}")
        try:
            strict = target.exact == "on" or target.footing.same
            drafts = draft_model.load_drafter(target, drafter)
            found = SelfCheck(
                target, cases, drafter=drafts, max_tokens=predict, seconds=seconds, seed=seed, exact=strict
            )
        except ValueError as wrong:
            usage_error(f"-n/--predict: {wrong}")
        if strict and found.exact_sizes is None and target.can_rollback:
            note("comparing batch sizes bit by bit; this happens once per model and machine")
        note(f"checking for up to {seconds:g} seconds")
        ended = _run(found)
        checks = report(found)
        try:
            if as_json != "-":
                with guarded_stdout():
                    show(found, checks, _heading(target, found), skipped)
        finally:
            # Even where the reader of the table has gone, as head does.
            if as_json is not None:
                selection = {"prompts": str(prompts) if prompts else None}
                output.write(
                    {"selection": selection, "load": asdict(load), **_document(target, found, checks, skipped)}
                )
    failed = [f"{check.name} ({check.reason})" for check in checks if check.status == "failed"]
    if failed and not ended.code:
        fail(f"this must hold and does not: {'; '.join(failed)}")
    leave(ended)


def _run(found: SelfCheck) -> Outcome:
    """Make the checks; what was found before an interruption stays in `found`."""
    with outcome() as ended, timed_bar(found.seconds) as doing:
        for name in found.run():
            doing(name)
    return ended


def _heading(target: Target, found: SelfCheck) -> list[str]:
    drafts = f"drafter {found.drafter}, drafts always sent; up to {found.max_tokens} tokens per text, seed {found.seed}"
    mode = exact_mode(found.exact_sizes) if found.exact else "default mode"
    return [*model_lines(target), f"{mode}; {drafts}"]


def _document(target: Target, found: SelfCheck, checks: Sequence[Check], skipped: Sequence[Skipped]) -> dict[str, Any]:
    """Everything found, and everything it depends on."""
    return {
        **provenance(target),
        "complete": found.complete,
        "verdict": verdict(checks, complete=found.complete),
        "settings": {
            "drafter": found.drafter,
            "max_tokens": found.max_tokens,
            "seconds": found.seconds,
            "seed": found.seed,
            "exact": found.exact,
            "exact_sizes": found.exact_sizes,
            **load_settings(target),
        },
        "probe": found.probed.to_json() if found.probed else None,
        "checks": [asdict(check) for check in checks],
        "texts": [_finite(asdict(pair)) for pair in found.pairs],
        "rollbacks": [_finite(asdict(test)) for test in found.rollbacks],
        "skipped": [asdict(prompt) for prompt in skipped],
    }


def _finite(record: dict[str, Any]) -> dict[str, Any]:
    """JSON has no infinity."""
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
