"""`ngramspec complete --beams W`: the most likely text that beam search finds."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ngramspec.acceptance.verifier import Acceptance
from ngramspec.beams.search import DRAFT_MAX, SEQUENCES, BeamSearch
from ngramspec.cost.store import StoredTimes
from ngramspec.llama.target import Target
from ngramspec.loading.load import open_alone
from ngramspec.loading.settings import LoadSettings
from ngramspec.models.find import ModelSource
from ngramspec.sampling.settings import NO_RULES, Sampling, TextRules, options

from .console import Outcome, guard_stdout, note, usage_error, write_stdout
from .options import DISPLAY, check_sampling, token_limit
from .show import counting_bar, slow_core


def check_beams(
    sampling: Sampling,
    rules: TextRules,
    acceptance: Acceptance,
    load: LoadSettings,
    other_options: Mapping[str, object | None],
) -> None:
    """End the program if an option is set that beam search would have to ignore, such as a flag with a value."""
    plain, others = LoadSettings(), dict[str, bool]()
    others["--exact on: the position of a beam in the cache affects the rounding"] = load.exact == "on"
    others["--temp: it searches for the most likely text"] = not sampling.greedy
    others["penalties, logit biases, grammars or infill"] = sampling.changes_logits
    others["--acceptance, --lenience or --typical-acceptance"] = acceptance != Acceptance()
    for name in ("drafter", "policy", "memory", "draft_model", "mtp"):
        others[f"--{name.replace('_', '-')}"] = getattr(load, name) != getattr(plain, name)
    for name, setting in options(rules).items():
        others[setting.flags[0]] = getattr(rules, name) != getattr(NO_RULES, name)
    for flag, value in other_options.items():
        others[flag] = value is not None
    for flag, is_set in others.items():
        if is_set:
            usage_error(f"--beams cannot be combined with {flag}")


def complete_with_beams(
    model: ModelSource,
    load: LoadSettings,
    sampling: Sampling,
    make_prompt: Callable[[Target, int], list[int]],
    beams: int,
    predict: int,
    stop: Sequence[str],
    *,
    around: tuple[str, str],
    as_json: bool,
) -> None:
    """Run beam search and print the best text; `make_prompt` leaves room for a number of tokens after the prompt."""
    # The positions of the beams in the KV cache affect the rounding, so exact mode would have no effect.
    target = open_alone(model, replace(load, exact="off"), DISPLAY, n_seq=SEQUENCES)
    check_sampling(target.vocabulary, sampling)
    prompt = make_prompt(target, token_limit(predict) * beams)
    search = BeamSearch(
        target,
        beams,
        stored=None if load.no_draft else StoredTimes(target.sequences[0]),
        draft_max=load.draft_max or DRAFT_MAX,
    )
    limit = None if predict == -1 else predict
    start = time.perf_counter()
    with guard_stdout():
        with Outcome() as outcome, counting_bar("reading") as progress:
            for _ in search.run(prompt, max_tokens=limit, stop=stop, progress=progress):
                pass
        seconds = time.perf_counter() - start
        hypotheses = search.hypotheses()
        best = hypotheses[0] if hypotheses else None
        text = f"{around[0]}{best.text if best else ''}{around[1]}"
        ending = (best.stop if best else None) or outcome.word
        if as_json:
            write_stdout(json.dumps(_document(search, text, len(prompt), seconds, ending), ensure_ascii=False) + "\n")
        else:
            write_stdout(text)
    note(_summary(search, ending))
    if not load.no_draft and (slow := slow_core()) is not None:
        note(slow)
    outcome.reraise()


def _document(search: BeamSearch, text: str, prompt_tokens: int, seconds: float, ending: str) -> dict[str, Any]:
    stats, hypotheses = search.stats, search.hypotheses()
    return {
        "text": text,
        "tokens": len(hypotheses[0].tokens) if hypotheses else 0,
        "score": hypotheses[0].score if hypotheses else None,
        "beams": [
            {"text": beam.text, "tokens": list(beam.tokens), "score": beam.score, "stop_reason": beam.stop}
            for beam in hypotheses
        ],
        "prompt_tokens": prompt_tokens,
        "target_passes": stats.passes,
        "plain_passes": stats.tokens,
        "drafted": stats.drafted,
        "accepted": stats.accepted,
        "seconds": seconds,
        "prefill_seconds": stats.prefill_seconds,
        "tokens_per_second": stats.tokens_per_second,
        "stop_reason": ending,
    }


def _summary(search: BeamSearch, ending: str) -> str:
    stats, hypotheses = search.stats, search.hypotheses()
    parts = [f"{len(hypotheses[0].tokens) if hypotheses else 0} tokens, best of {search.beams} beams"]
    if stats.tokens_per_second is not None:
        parts.append(f"{stats.tokens_per_second:.1f} tokens/s")
        parts.append(f"{stats.passes} passes instead of {stats.tokens} without drafts")
    return ", ".join(parts) + f"; {ending}"
