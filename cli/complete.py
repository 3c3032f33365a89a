"""`ngramspec complete`: raw continuation of a file or a pipe, or the most likely one by beam search, on stdout."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from errno import EINVAL, ENAMETOOLONG, ENOENT, ENOTDIR
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from ngramspec.acceptance.verifier import Acceptance
from ngramspec.beams.search import DRAFT_MAX, SEQUENCES, BeamSearch
from ngramspec.cost.store import StoredTimes
from ngramspec.decoding.decoder import SpeculativeDecoder
from ngramspec.drafting import REMEMBERING, supports_prediction
from ngramspec.drafting.draft import NO_DRAFT
from ngramspec.fill_in import Limits, fill_in
from ngramspec.instruments.trace import TraceHeader, TraceWriter
from ngramspec.llama.target import Target
from ngramspec.loading.load import find, open_alone, open_resolved
from ngramspec.loading.settings import LoadSettings
from ngramspec.models.find import ModelSource
from ngramspec.models.hub import PREFIX
from ngramspec.sampling.settings import NO_RULES, Sampling, TextRules, allow_int_range, allow_range, option, options
from ngramspec.steps import Stats, Step

from .console import Outcome, fail, note, read_source, read_text, usage_error, write_stdout
from .models import complete_model
from .options import (
    DISPLAY,
    MODEL,
    STOP,
    TRACE,
    SamplingOptions,
    check_sampling,
    choose_model,
    is_model,
    keep,
    predict_option,
    token_limit,
)
from .show import AnswerReport, counting_bar, slow_core


def complete(
    load: LoadSettings,
    sampling: SamplingOptions,
    rules: TextRules,
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            autocompletion=complete_model,
            help="GGUF file or model name, as for ngramspec chat; optional.",
        ),
    ] = None,
    file: Annotated[
        str | None, typer.Argument(metavar="FILE|-", help="File with the text to continue; - or no argument: stdin.")
    ] = None,
    model_option: str | None = MODEL,
    text_file: str | None = option(
        None, "-f", "--file", metavar="FILE", help="File with the text to continue, instead of the argument."
    ),
    prompt_text: str | None = option(None, "-p", "--prompt", help="Text to continue, unchanged, instead of a file."),
    predict: int = predict_option(256, "Maximum number of tokens to generate; -1: until the context is full."),
    stop: tuple[str, ...] = STOP,
    suffix: str | None = option(
        None, metavar="FILE|-", help="Fill in the middle: file with the text after the gap; needs a model with support."
    ),
    prediction: str | None = option(
        None, metavar="FILE", help="File that the continuation is likely to repeat, used for drafting."
    ),
    truncate: bool = option(False, help="If the text is too long, keep its end instead of failing."),
    echo: bool = option(
        False, help="Also print the text itself before its continuation, and that of --suffix after it."
    ),
    as_json: bool = option(False, "--json", help="Print a JSON object instead of the text."),
    logprobs: int | None = option(
        None, help="With --json: log-probabilities of each token and the N most likely ones.", allowed=allow_range(0)
    ),
    trace: Path | None = TRACE,
    beams: int | None = option(
        None, metavar="W", help="Beam search with W beams.", allowed=allow_int_range(1, SEQUENCES - 1)
    ),
) -> None:
    """Continue a text.

    Example: cat app.py | ngramspec complete model.gguf -n 200 > rest.py

    A single argument is the model if it is a GGUF file, an hf: name or smollm2, or if -f or -p gives the text.
    Otherwise it is the text file. Only the continuation goes to stdout; statistics go to stderr.

    --json prints an object with text, tokens, prompt_tokens, target_passes, drafted, accepted, seconds,
    tokens_per_second, stop_reason, seed and more. lossy names the option that changed the output, exact is true if the
    text is bit-identical with and without drafts, and close_calls counts the tokens that rounding could have decided.
    With --policy entropy, steps has the entropy and gamma of each pass (with --trace, the trace has them). --logprobs N
    adds the log-probabilities of each token and of the N most likely ones, before any sampling setting.

    --suffix FILE fills in the middle: the text comes before the gap, FILE comes after it, and only the text in between
    is printed. This requires a model with tokens for it, such as Qwen2.5-Coder. If both texts do not fit, --truncate
    keeps the parts next to the gap, three quarters of them before it. Editors also use
    --samplers "top_k;top_p;infill;temperature", which ends the text as soon as that is likely.

    --prediction FILE names a text that the continuation is likely to repeat, such as the file to edit, if the prompt
    does not contain it. A wrong prediction affects only the speed.

    --beams W searches for the most likely text with beam search, without a length penalty; --json lists all W texts
    with their scores. Drafts of up to --draft-max (16) steps save passes if that pays on this machine. W texts of -n
    tokens must fit in the context together with the prompt. Beam search cannot be combined with sampling, penalties,
    grammars or --exact on (the position of a beam in the cache affects the rounding), and does not support recurrent
    models.
    """
    limit = token_limit(predict)
    sampling_settings, acceptance = sampling.choose(load, rules.restriction)
    if logprobs is not None and not as_json:
        usage_error("--logprobs requires --json")
    if beams is not None:
        _check_beams(sampling_settings, rules, acceptance, load, {"--logprobs": logprobs, "--trace": trace})
    prediction_text = "" if prediction is None else _read_prediction(prediction, load, beams)
    is_named = model_option is not None or load.hf_repo is not None
    model, source = _arguments(model, file, text_file, prompt_text, is_named=is_named)
    model = choose_model(model, model_option)
    # A mistake in the text must not cost a download.
    downloads = model is None or any(name.startswith(PREFIX) for name in (model, load.draft_model or ""))
    local_source = None if downloads else find(model, load, DISPLAY)
    before, after = _read_texts(source, suffix, prompt_text)
    writer = TraceWriter(trace) if trace is not None else None
    model_source = local_source or find(model, load, DISPLAY)
    make_prompt = partial(_make_prompt, before, after, truncate=truncate)
    around = (before, after or "") if echo else ("", "")
    if beams is not None:
        arguments = sampling_settings, make_prompt, beams, predict, stop
        _complete_with_beams(model_source, load, *arguments, around=around, as_json=as_json)
        return
    loaded_model = open_resolved(model_source, load, DISPLAY, remember=True)
    target, decoder = loaded_model.target, loaded_model.decoder
    check_sampling(target.vocabulary, sampling_settings, logprobs)
    prompt = make_prompt(target, limit)
    if writer is not None:
        header = TraceHeader.of(decoder, model_source.label, sampling_settings, acceptance)
        writer.begin(prompt, target.vocabulary.piece, header)
    request = {
        "max_tokens": limit,
        "sampling": sampling_settings,
        "acceptance": acceptance,
        "stop": stop,
        "rules": rules,
        "logprobs": logprobs,
        "prediction": target.vocabulary.tokenize(prediction_text, add_bos=False) if prediction_text else (),
    }
    start = time.perf_counter()
    with writer or nullcontext():
        show: Callable[[str], None] = (lambda _: None) if as_json else write_stdout
        show(around[0])
        steps, stats, outcome = _generate(decoder, prompt, writer, show, request)
        if outcome.error is None:
            show(around[1])
        ending = (steps[-1].stop if steps else None) or outcome.word
        if as_json:
            document = {
                "text": "".join([around[0], *(step.text for step in steps), around[1]]),
                "prompt_tokens": len(prompt),
                **_figures(steps, stats, target.vocabulary.piece),
                "seconds": time.perf_counter() - start,
                "stop_reason": ending,
                "seed": sampling_settings.seed,
                "lossy": acceptance.lossy,
                "exact": decoder.exactness.bit_identical,
            }
            write_stdout(json.dumps(document, ensure_ascii=False) + "\n")
    keep(loaded_model.memory, target.vocabulary, steps)
    seed = None if sampling_settings.greedy else sampling_settings.seed
    AnswerReport().show(stats, decoder, target.governor, ending, seed=seed)
    outcome.reraise()


def _generate(
    decoder: SpeculativeDecoder,
    prompt: Sequence[int],
    writer: TraceWriter | None,
    show: Callable[[str], None],
    request: Mapping[str, Any],
) -> tuple[list[Step], Stats, Outcome]:
    """Show and trace a text while it is generated; return its steps, their counters and what ended it early."""
    steps, stats = list[Step](), Stats()
    with Outcome() as outcome, counting_bar("reading") as progress:
        for step in decoder.generate(prompt, return_decisions=writer is not None, progress=progress, **request):
            stats.add(step)
            if writer is None:
                steps.append(step)
            else:
                writer.add(step)
                # The decisions of a long text need much memory and are already in the trace.
                steps.append(replace(step, verified_draft=NO_DRAFT, decisions=(), policy_details={}))
            show(step.text)
    return steps, stats, outcome


def _read_prediction(file: str, load: LoadSettings, beams: int | None) -> str:
    if beams is not None or load.no_draft:
        usage_error(f"--prediction cannot be combined with {'--no-draft' if load.no_draft else '--beams'}")
    if not supports_prediction(load.drafter):
        usage_error(f"--drafter {load.drafter} does not support --prediction; use {' or '.join(sorted(REMEMBERING))}")
    if not (text := read_text(Path(file))):
        fail(f"the prediction {file} is empty")
    return text


def _arguments(
    model: str | None, file: str | None, text_file: str | None, prompt: str | None, *, is_named: bool
) -> tuple[str | None, str]:
    """Return the model or `None`, and the text file or "-"; `is_named` is True if an option names the model."""
    has_text = text_file is not None or prompt is not None
    is_text = is_named or not has_text  # unless the argument looks like a model
    if model is not None and file is None and is_text and not is_model(model):
        model, file = None, model
    if file is not None and is_model(file):
        if model is not None and is_model(model):
            usage_error(f"two models were given: {model} and {file}; remove one")
        usage_error(f"the model comes before the text: ngramspec complete {file} {model}")
    texts = {file: file, f"-f/--file {text_file}": text_file, "-p/--prompt": prompt}
    names = [name for name, text in texts.items() if text is not None]
    if len(names) > 1:
        usage_error(f"two texts were given: {names[0]} and {names[1]}; remove one")
    source = text_file if file is None else file
    if source == "":
        usage_error("the name of the text file must not be empty")
    return model, "-" if source is None else source


def _read_texts(source: str, suffix: str | None, prompt: str | None = None) -> tuple[str, str | None]:
    """Read the text to continue, unless `prompt` is given, and the text after the gap; `None` means no gap."""
    if suffix is not None and suffix == source and prompt is None:
        usage_error(
            f"the text and --suffix must be different files, got {'stdin' if source == '-' else source} for both"
        )
    if suffix == "":
        usage_error("the name of the --suffix file must not be empty")
    before = _read(source) if prompt is None else prompt
    if suffix is None:
        if not before:
            name = "-p/--prompt" if prompt is not None else "standard input" if source == "-" else source
            fail(f"{name} is empty: there is no text to continue")
        return before, None
    after = read_source(suffix, "no text after the gap; name a file or pipe one in")
    if not before and not after:
        fail("the texts before and after the gap are empty")
    return before, after


def _read(source: str) -> str:
    """Read the text to continue; an error in the name of its file shows how to pass a text itself."""
    try:
        return read_source(source, "no text to continue; pipe one in, name a file or set -p/--prompt")
    except OSError as error:
        if error.errno not in (ENOENT, ENOTDIR, ENAMETOOLONG, EINVAL):
            raise
        name = source if len(source) <= 80 else f"{source[:80]}..."
        fail(f"{name}: {error.strerror}; to continue a text itself, use -p/--prompt TEXT")


def _make_prompt(before: str, after: str | None, target: Target, limit: int, *, truncate: bool) -> list[int]:
    length = len(before) + len(after or "")
    if length >= 1 << 20:
        # Tokenizing 30 MB would take a minute. The cut may change the first tokens of a text, so the limit is twice the
        # number of characters that fit.
        max_chars = 2 * target.n_ctx * target.vocabulary.longest_token
        before, after = before[-max_chars:], None if after is None else after[:max_chars]
    left_out = len(before) + len(after or "") < length
    prompt: list[int] = []
    if truncate or not left_out:
        prompt = target.vocabulary.tokenize(before) if after is None else fill_in(target.vocabulary, before, after)
    if len(prompt) < target.n_ctx and not left_out:
        return prompt
    size = f"more than {target.n_ctx}" if left_out else str(len(prompt))
    if not truncate:
        part = "its end" if after is None else "the parts next to the gap"
        fail(
            f"the text has {size} tokens and leaves no room for an answer in the context of {target.n_ctx};"
            f" raise -c/--ctx-size, or keep only {part} with --truncate"
        )
    n_kept = target.n_ctx - min(limit, target.n_ctx // 2)
    if after is None:
        note(f"warning: the text has {size} tokens; only the last {n_kept} are used")
        # Keep the token that the model requires at the start of every text.
        bos = target.vocabulary.tokenize("")[:1]
        bos = bos if bos == prompt[:1] else []
        return bos + prompt[len(bos) - n_kept :]
    return _cut_around_gap(target, before, after, n_kept)


def _cut_around_gap(target: Target, before: str, after: str, n_kept: int) -> list[int]:
    """Return a prompt of `n_kept` tokens: three quarters before the gap, unless one side needs fewer tokens."""
    room = n_kept - len(fill_in(target.vocabulary, "", ""))
    sizes = [len(target.vocabulary.tokenize(text, add_bos=False)) for text in (before, after)]
    n_after = min(sizes[1], max(room // 4, room - sizes[0]))
    note(
        f"warning: the texts have {sum(sizes)} tokens; only {room - n_after} before the gap and {n_after} after it"
        " are used"
    )
    return fill_in(target.vocabulary, before, after, limits=Limits(room - n_after, n_after))


def _figures(steps: Sequence[Step], stats: Stats, piece: Callable[[int], bytes]) -> dict[str, Any]:
    """Return the JSON fields of all steps and their sums; `piece` returns the bytes of a token."""
    names = ("drafted", "accepted", "prefill_seconds", "decode_seconds", "tokens_per_second", "tokens_per_pass")
    document: dict[str, Any] = {
        "tokens": stats.generated,
        "target_passes": stats.passes,
        **{name: getattr(stats, name) for name in (*names, "acceptance_rate", "estimated_gain", "close_calls")},
    }
    detailed_steps = [step for step in steps if step.policy_details]
    if detailed_steps:
        document["steps"] = [
            {**step.policy_details, "drafted": len(step.drafted), "accepted": step.accepted} for step in detailed_steps
        ]
    if logprobs := [entry for step in steps for entry in step.logprobs]:
        document["logprobs"] = [
            {
                **_token(entry.token, piece),
                "logprob": entry.logprob,
                "top_logprobs": [{**_token(token, piece), "logprob": value} for token, value in entry.top],
            }
            for entry in logprobs
        ]
    return document


def _token(token: int, piece: Callable[[int], bytes]) -> dict[str, Any]:
    # A token may be part of a character, so its bytes are included.
    raw = piece(token)
    return {"id": token, "token": raw.decode("utf-8", "replace"), "bytes": list(raw)}


def _check_beams(
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
    for name, setting in options(TextRules).items():
        others[setting.flags[0]] = getattr(rules, name) != getattr(NO_RULES, name)
    for flag, value in other_options.items():
        others[flag] = value is not None
    for flag, is_set in others.items():
        if is_set:
            usage_error(f"--beams cannot be combined with {flag}")


def _complete_with_beams(
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
    with Outcome() as outcome, counting_bar("reading") as progress:
        for _ in search.run(prompt, max_tokens=limit, stop=stop, progress=progress):
            pass
    seconds = time.perf_counter() - start
    stats, hypotheses = search.stats, search.hypotheses()
    best = hypotheses[0] if hypotheses else None
    n_tokens = len(best.tokens) if best else 0
    text = f"{around[0]}{best.text if best else ''}{around[1]}"
    ending = (best.stop if best else None) or outcome.word
    document = {
        "text": text,
        "tokens": n_tokens,
        "score": best.score if best else None,
        "beams": [
            {"text": beam.text, "tokens": list(beam.tokens), "score": beam.score, "stop_reason": beam.stop}
            for beam in hypotheses
        ],
        "prompt_tokens": len(prompt),
        "target_passes": stats.passes,
        "plain_passes": stats.tokens,
        "drafted": stats.drafted,
        "accepted": stats.accepted,
        "seconds": seconds,
        "prefill_seconds": stats.prefill_seconds,
        "tokens_per_second": stats.tokens_per_second,
        "stop_reason": ending,
    }
    write_stdout(json.dumps(document, ensure_ascii=False) + "\n" if as_json else text)
    summary = f"{n_tokens} tokens, best of {beams} beams"
    if stats.tokens_per_second is not None:
        summary += f", {stats.tokens_per_second:.1f} tokens/s"
        summary += f", {stats.passes} passes instead of {stats.tokens} without drafts"
    note(f"{summary}; {ending}")
    if not load.no_draft and (slow := slow_core()) is not None:
        note(slow)
    outcome.reraise()
