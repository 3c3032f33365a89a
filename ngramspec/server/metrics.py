"""`/metrics`: the engine's counters as Prometheus reads them, under llama-server's names and vLLM's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

from starlette.responses import PlainTextResponse, Response

from ngramspec.batching.request import Report
from ngramspec.server.fields import Fields
from ngramspec.server.served import Server


class Metric(NamedTuple):
    """A figure, or one for each position of a draft."""

    name: str
    kind: Literal["counter", "gauge"]
    help: str
    value: float | list[int]


async def metrics(server: Server, _given: Fields) -> Response:
    """All figures, as text."""
    model = server.ready()
    label = f'model_name="{_escaped(model.name)}"'
    lines = [line for one in figures(model.service.report(), model.n_ctx) for line in _lines(one, label)]
    return PlainTextResponse("\n".join(lines) + "\n", media_type="text/plain; version=0.0.4")


def figures(report: Report, n_ctx: int) -> Iterator[Metric]:
    """The figures of a report."""
    stats, busy = report.stats, sum(slot.busy for slot in report.slots)
    drafts = stats.passes - stats.passes_without_draft
    held, room = sum(slot.held for slot in report.slots), n_ctx * len(report.slots)
    prompt_rate = report.prompt_tokens / stats.prefill_seconds if stats.prefill_seconds else 0.0
    rate = stats.tokens_per_second or 0.0
    for prefix, running, waiting, generated in (
        ("llamacpp", "requests_processing", "requests_deferred", "tokens_predicted_total"),
        ("vllm", "num_requests_running", "num_requests_waiting", "generation_tokens_total"),
    ):
        yield Metric(f"{prefix}:prompt_tokens_total", "counter", "Prompt tokens evaluated.", report.prompt_tokens)
        yield Metric(f"{prefix}:{generated}", "counter", "Tokens generated.", stats.generated)
        yield Metric(f"{prefix}:{running}", "gauge", "Requests at work.", busy)
        yield Metric(f"{prefix}:{waiting}", "gauge", "Requests in the queue.", report.waiting)
        name = f"{prefix}:spec_decode_num"
        yield Metric(f"{name}_drafts_total", "counter", "Passes that held a draft.", drafts)
        yield Metric(f"{name}_draft_tokens_total", "counter", "Draft tokens sent.", stats.drafted)
        yield Metric(f"{name}_accepted_tokens_total", "counter", "Draft tokens accepted.", stats.accepted)
        help_ = "Draft tokens accepted, by position in the draft."
        yield Metric(f"{name}_accepted_tokens_per_pos_total", "counter", help_, list(stats.accepted_at))
    yield Metric("llamacpp:prompt_seconds_total", "counter", "Time of evaluating prompts.", stats.prefill_seconds)
    help_ = "Time from first tokens to last."
    yield Metric("llamacpp:tokens_predicted_seconds_total", "counter", help_, stats.decode_seconds)
    yield Metric("llamacpp:prompt_tokens_seconds", "gauge", "Prompt tokens per second, over all.", prompt_rate)
    yield Metric("llamacpp:predicted_tokens_seconds", "gauge", "Tokens per second, over all.", rate)
    yield Metric("llamacpp:n_decode_total", "counter", "Batches evaluated.", report.passes)
    slots_each = report.busy / report.passes if report.passes else 0.0
    yield Metric("llamacpp:n_busy_slots_per_decode", "gauge", "Slots at work in a batch, on average.", slots_each)
    asked = report.prompt_tokens + report.cached_tokens
    yield Metric("vllm:prefix_cache_queries_total", "counter", "Prompt tokens looked for in the cache.", asked)
    yield Metric("vllm:prefix_cache_hits_total", "counter", "Prompt tokens found there.", report.cached_tokens)
    yield Metric("vllm:kv_cache_usage_perc", "gauge", "Share of the cache that is held, 0 to 1.", held / room)
    yield Metric("ngramspec:close_calls_total", "counter", "Tokens that rounding could decide.", stats.close_calls)


def _lines(one: Metric, label: str) -> Iterator[str]:
    yield f"# HELP {one.name} {one.help}"
    yield f"# TYPE {one.name} {one.kind}"
    if isinstance(one.value, list):
        for position, value in enumerate(one.value):
            yield f'{one.name}{{{label},position="{position}"}} {value}'
    else:
        yield f"{one.name}{{{label}}} {one.value:.12g}"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
