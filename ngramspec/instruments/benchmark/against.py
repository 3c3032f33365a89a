"""Comparison with a running server (`RemoteServer`): both sides continue the same prompts once, in alternating order.

llama-server and `ngramspec serve` receive the tokens of the prompt at `/completion`, and return the time of decoding.
Other servers with OpenAI's `/v1/completions` receive the text and return a stream, whose time is measured from the
first piece to the last. The speed is the number of tokens after the first per second after the first token.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence
from http.client import HTTPException, HTTPResponse
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from ngramspec.acceptance.verifier import Acceptance
from ngramspec.cost.paired import compare_pairs
from ngramspec.data import NGramSpecError
from ngramspec.decoding.decoder import SpeculativeDecoder
from ngramspec.instruments.benchmark.figures import median_of, speed
from ngramspec.instruments.prompts import Case
from ngramspec.instruments.reports.report import OVERALL, Report, Section, Table, figure
from ngramspec.sampling.settings import Sampling
from ngramspec.tokens import Tokenizer

SHARED_SETTINGS = ("temperature", "top_k", "top_p", "min_p", "seed")  # names that all these servers support

Answer = tuple[str, int, float]
"""Answer of one side to a prompt: its text, number of tokens, and seconds from the first to the last."""

Pair = dict[str, Any]
"""Both answers to one prompt, as JSON: "category", "prompt", "ratio" (our tokens per second / theirs; `None` if a speed
is unknown), "same_text", and for "ours" and "theirs" their "tokens", "seconds" and "tokens_per_second"."""


def compare_answers(case: Case, ours: Answer, theirs: Answer) -> Pair:
    sides = {}
    for side, (_, tokens, seconds) in (("ours", ours), ("theirs", theirs)):
        speed = (tokens - 1) / seconds if tokens > 1 and seconds > 0 else None
        sides[side] = {"tokens": tokens, "seconds": seconds, "tokens_per_second": speed}
    a, b = (side["tokens_per_second"] for side in sides.values())
    ratio = a / b if a and b else None
    return {"category": case.category, "prompt": case.id, "ratio": ratio, "same_text": ours[0] == theirs[0], **sides}


class RemoteServer:
    """A server to compare with; OPENAI_API_KEY may contain a key for it."""

    def __init__(self, url: str, tokenizer: Tokenizer) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self._tokenizer = tokenizer
        self._ways = {"/completion": _read_json, "/v1/completions": _read_stream}

    def ask(self, prompt: Sequence[int], max_tokens: int, sampling: Sampling) -> Answer:
        """Let the server continue a prompt, without its prompt cache; an NGramSpecError means that it fails."""
        settings = {name: getattr(sampling, name) for name in SHARED_SETTINGS}
        text = b"".join(self._tokenizer.piece(token) for token in prompt).decode("utf-8", "replace")
        usage = {"stream": True, "stream_options": {"include_usage": True}}
        bodies: dict[str, dict[str, Any]] = {
            # The prompt is sent as tokens, so that the server continues exactly the same prompt.
            "/completion": {"prompt": list(prompt), "n_predict": max_tokens, "cache_prompt": False},
            "/v1/completions": {"model": "any", "prompt": text, "max_tokens": max_tokens, **usage},
        }
        for path, read in list(self._ways.items()):
            try:
                with self._post(path, bodies[path] | settings) as response:
                    return read(response)
            except HTTPError as error:
                if error.code not in (404, 405):
                    body = error.read(2000).decode("utf-8", "replace")
                    raise NGramSpecError(f"{self.url}{path} returned status {error.code}: {body}") from error
                del self._ways[path]  # the server lacks this endpoint
            except (OSError, HTTPException) as error:
                reason = error.reason if isinstance(error, URLError) else error
                raise NGramSpecError(f"{self.url} does not respond: {reason}") from error
            except (ValueError, KeyError, TypeError) as error:
                raise NGramSpecError(f"{self.url}{path} returned a response without text or timings") from error
        raise NGramSpecError(f"{self.url} has neither /completion nor /v1/completions")

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        key = os.environ.get("OPENAI_API_KEY")
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        try:
            request = Request(self.url + path, json.dumps(body).encode(), headers)
        except ValueError as error:
            raise NGramSpecError(f"{self.url} is not a valid URL: {error}") from error
        return urlopen(request, timeout=3600.0)


def _read_json(response: HTTPResponse) -> Answer:
    answer = json.loads(response.read())
    timings = answer["timings"]
    return answer["content"], timings["predicted_n"], timings["predicted_ms"] / 1000


def _read_stream(response: HTTPResponse) -> Answer:
    text, tokens, first, last = "", 0, 0.0, 0.0
    for line in response:
        if not line.startswith(b"data: {"):
            continue
        chunk = json.loads(line.removeprefix(b"data: "))
        piece = "".join(choice.get("text") or "" for choice in chunk.get("choices", ()))
        if piece:
            last = time.perf_counter()
            first = first or last
            text += piece
        tokens = (chunk.get("usage") or {}).get("completion_tokens", tokens)
    return text, tokens, last - first


def compare(
    decoder: SpeculativeDecoder,
    server: RemoteServer,
    cases: Sequence[Case],
    max_tokens: int,
    sampling: Sampling,
    acceptance: Acceptance | None = None,
) -> Iterator[Pair]:
    """Generate with both sides for each case, in alternating order, and yield the pairs of answers."""
    # Each side generates only once, because a drafter would know the text of a second run.
    for number, case in enumerate(cases):
        before = server.ask(case.tokens, max_tokens, sampling) if number % 2 else None
        decoder.sequence.clear()
        steps = list(decoder.generate(case.tokens, max_tokens=max_tokens, sampling=sampling, acceptance=acceptance))
        text, tokens = "".join(step.text for step in steps), sum(len(step.tokens) for step in steps)
        ours = text, tokens, sum(step.elapsed for step in steps)
        yield compare_answers(case, ours, before or server.ask(case.tokens, max_tokens, sampling))


def against_report(url: str, command: str, setup: Sequence[str], pairs: Sequence[Pair], total: int) -> Report:
    """Return the report on the completed pairs, of `total` prompts."""
    groups: dict[str, list[Pair]] = {}
    for pair in pairs:
        groups.setdefault(pair["category"], []).append(pair)
    rows = [
        [
            name,
            str(len(group)),
            *(speed(median_of(pair[side]["tokens_per_second"] for pair in group)) for side in ("theirs", "ours")),
            figure(median_of(pair["ratio"] for pair in group), ".2f", "x"),
            f"{sum(pair['same_text'] for pair in group)} of {len(group)}",
        ]
        for name, group in [*groups.items(), (OVERALL, pairs)]
    ]
    table = Table(["category", "prompts", "theirs", "ours", "ratio", "same text"], rows, totals=1)
    about = f"compared with {url}, alternating, each prompt once; medians over prompts."
    result = compare_pairs([pair["ratio"] for pair in pairs if pair["ratio"] is not None])
    headline = "no speed measured" if result is None else f"ngramspec, compared with this server: {result}"
    notes = [f"INCOMPLETE: stopped after {len(pairs)} of {total} prompts"] if len(pairs) < total else []
    sections = [Section("Tokens per second of decoding", about, [table])]
    return Report("Comparison with a server", command, sections=sections, notes=notes, headline=headline, setup=setup)
