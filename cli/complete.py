"""`ngramspec complete`: raw continuation of a file or a pipe. Only the continuation goes to stdout."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from ngramspec.source import is_model_argument
from ngramspec.stats import Stats
from ngramspec.target import Target

from .console import (
    INTERRUPTED,
    TERMINATED,
    Terminated,
    fail,
    guarded_stdout,
    note,
    prefill_bar,
    usage_error,
    write_stdout,
)
from .options import DraftOptions, LoadOptions, SamplingOptions, check_predict
from .recall import keep
from .summary import summary


def complete(
    load: LoadOptions,
    sampling: SamplingOptions,
    draft: DraftOptions,
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL", help="GGUF file or hf:owner/repo:file-or-quant; may be left out.", show_default=False
        ),
    ] = None,
    file: Annotated[
        str | None,
        typer.Argument(metavar="FILE|-", help="Text to continue; -, or nothing: stdin.", show_default=False),
    ] = None,
    text_file: Annotated[
        str | None, typer.Option("-f", "--file", help="Text to continue, as an option.", show_default=False)
    ] = None,
    predict: Annotated[int, typer.Option("-n", "--predict", help="Most tokens; -1: until the context is full.")] = 256,
    stop: Annotated[list[str] | None, typer.Option("--stop", help="End before this text; may be repeated.")] = None,
    truncate: Annotated[bool, typer.Option("--truncate", help="Keep the tail of a text that is too long.")] = False,
    echo: Annotated[bool, typer.Option("--echo", help="Print the text before its continuation.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of the text.")] = False,
) -> None:
    """Continue a text: cat app.py | ngramspec complete model.gguf -n 200 > rest.py

    One argument is the model if it is a GGUF file or an hf: name, else the text file.
    """
    limit = check_predict(predict)
    chosen = sampling.sampling()
    if any(not s for s in stop or ()):
        usage_error("--stop needs some text")
    model, source = _arguments(model, file, text_file)
    # The text first: a mistake there should not cost a download.
    text = _read(source)
    target = load.load(load.find(model))
    memory = draft.open_memory(target, keep=True)
    decoder = draft.decoder(target, memory)
    prompt = _prompt(target, text, limit, truncate)

    stats, pieces, code = Stats(), [], 0
    answer: list[int] = []
    ending: str = "interrupted"
    began = time.perf_counter()
    with guarded_stdout():
        if echo and not as_json:
            write_stdout(text)
        try:
            with prefill_bar() as progress:
                for step in decoder.generate(
                    prompt,
                    max_tokens=limit,
                    sampling=chosen,
                    verify=sampling.verify,
                    stop=stop or (),
                    progress=progress,
                ):
                    stats.add(step)
                    pieces.append(step.text)
                    answer += [token for token in step.tokens if not target.is_eog(token)]
                    ending = step.stop or ending
                    if not as_json:
                        write_stdout(step.text)
        except KeyboardInterrupt:
            code = INTERRUPTED
        except Terminated:
            code = TERMINATED
        seconds = time.perf_counter() - began
        if as_json:
            written = (text if echo else "") + "".join(pieces)
            result = _result(written, len(prompt), stats, seconds, ending, chosen.seed)
            write_stdout(json.dumps(result, ensure_ascii=False) + "\n")
    keep(memory, answer)
    note(f"{summary(stats)}; {ending}" + ("" if chosen.greedy else f"; seed {chosen.seed}"))
    if code:
        raise typer.Exit(code)


def _arguments(model: str | None, file: str | None, text_file: str | None) -> tuple[str | None, str]:
    """(model or None for the default, text file or "-"), told apart as the help says."""
    if model is not None and file is None and not _names_model(model, text_given=text_file is not None):
        model, file = None, model
    if file is not None and text_file is not None:
        usage_error(f"two texts are named: {file} and, with -f/--file, {text_file}; give one")
    source = text_file if file is None else file
    if source == "":
        usage_error("the name of the text file is empty")
    return model, "-" if source is None else source


def _names_model(argument: str, *, text_given: bool) -> bool:
    # A file that is missing has no first bytes to tell by; its name is the next best thing.
    missing_model = argument.endswith(".gguf") and not Path(argument).exists()
    return text_given or missing_model or is_model_argument(argument)


def _read(source: str) -> str:
    """The text to continue; ends the program if there is none or it is not UTF-8."""
    name = "standard input" if source == "-" else source
    if source == "-":
        if sys.stdin is None or sys.stdin.isatty():
            usage_error("no text to continue: name a file, or pipe one in (see ngramspec complete --help)")
        raw = sys.stdin.buffer.read()
    else:
        raw = Path(source).read_bytes()
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        fail(f"{name} is not UTF-8 text (byte {error.start} is 0x{raw[error.start]:02x}); convert it first")
    if not text:
        fail(f"{name} is empty: there is nothing to continue")
    return text


def _prompt(target: Target, text: str, limit: int, truncate: bool) -> list[int]:
    prompt = target.tokenize(text)
    if len(prompt) < target.n_ctx:
        return prompt
    if not truncate:
        fail(
            f"the text has {len(prompt)} tokens, but the context holds {target.n_ctx} and needs room for an answer;"
            " raise -c/--ctx-size, or keep only the text's tail with --truncate"
        )
    keep = target.n_ctx - min(limit, target.n_ctx // 2)
    note(f"the text has {len(prompt)} tokens; its last {keep} are used")
    # What the model wants at the start of every text is not the text's.
    bos = target.tokenize("")[:1]
    bos = bos if bos == prompt[:1] else []
    return bos + prompt[len(bos) - keep :]


def _result(text: str, prompt_tokens: int, stats: Stats, seconds: float, ending: str, seed: int) -> dict[str, Any]:
    return {
        "text": text,
        "tokens": stats.generated,
        "prompt_tokens": prompt_tokens,
        "target_passes": stats.passes,
        "drafted": stats.drafted,
        "accepted": stats.accepted,
        "seconds": seconds,
        "prefill_seconds": stats.prefill_seconds,
        "tokens_per_second": stats.tokens_per_second,
        "tokens_per_pass": stats.tokens_per_pass,
        "acceptance_rate": stats.acceptance_rate,
        "estimated_gain": stats.estimated_gain,
        "stop_reason": ending,
        "seed": seed,
    }
