"""`/metrics` for Prometheus: the engine's counters under llama-server's and vLLM's names."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from starlette.responses import PlainTextResponse, Response

from ngramspec.batching.request import Report
from ngramspec.llama.embedder import Embedder
from ngramspec.server.call import Call
from ngramspec.server.errors import ApiError
from ngramspec.server.state import ServedModel


class Metric(NamedTuple):
    """A metric and its value."""

    name: str
    kind: str  # "counter" or "gauge"
    description: str
    value: float | tuple[int, ...]  # a tuple has one value for each position of a draft


async def metrics(call: Call) -> Response:
    """Return the metrics in Prometheus' text format."""
    if not call.server.has_metrics:
        raise ApiError(501, "/metrics is disabled; start the server with --metrics")
    model = call.model
    escaped_name = model.name.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
    lines: list[str] = []
    for name, kind, description, value in _metrics(model):
        lines += [f"# HELP {name} {description}", f"# TYPE {name} {kind}"]
        # As on the two servers, only vLLM's metrics name the model.
        labels = [f'model_name="{escaped_name}"'] if name.startswith("vllm:") else []
        if isinstance(value, tuple):
            lines += [_line(name, [*labels, f'position="{i}"'], count) for i, count in enumerate(value)]
        else:
            lines.append(_line(name, labels, value))
    headers = {"Process-Start-Time-Unix": str(call.server.started_at)}
    return PlainTextResponse("\n".join(lines) + "\n", media_type="text/plain; version=0.0.4", headers=headers)


def _line(name: str, labels: list[str], value: float) -> str:
    return f"{name}{{{','.join(labels)}}} {value:.12g}" if labels else f"{name} {value:.12g}"


def _metrics(model: ServedModel) -> Iterator[Metric]:
    report = model.service.report()
    yield from _common_metrics(report, model.embedder)
    yield from _llama_server_metrics(report, model.embedder)
    yield from _vllm_metrics(report, model.n_ctx)
    description = "Tokens that rounding could have decided."
    yield Metric("ngramspec:close_calls_total", "counter", description, report.stats.close_calls)
    times = model.service.times.evidence
    for size, ratio in times["ratios"].items():
        description = f"Cost of a decode call of {size} tokens, in calls of one token."
        yield Metric(f"ngramspec:pass_cost_{size}", "gauge", description, ratio)
    yield Metric("ngramspec:pass_pairs_total", "counter", "Pairs of decode calls that costs rest on.", times["pairs"])
    if model.threads is not None:
        state = model.threads()
        yield Metric("ngramspec:threads", "gauge", "CPU threads of a decode call of one token.", state.threads)
        yield Metric(
            "ngramspec:threads_batch", "gauge", "CPU threads of a decode call of a draft.", state.threads_batch
        )
        yield Metric(
            "ngramspec:threads_prompt", "gauge", "CPU threads of a decode call of a prompt.", state.threads_prompt
        )
        if state.other_cores is not None:
            yield Metric("ngramspec:other_cores", "gauge", "CPU cores that other programs use.", state.other_cores)


def _common_metrics(report: Report, embedder: Embedder | None) -> Iterator[Metric]:
    """Yield the metrics that both servers have, under both names."""
    stats, running = report.stats, sum(slot.request is not None for slot in report.slots)
    prompt_tokens = report.prompt_tokens + (embedder.n_tokens if embedder is not None else 0)
    for prefix, running_name, waiting_name, generated_name in (
        ("llamacpp", "requests_processing", "requests_deferred", "tokens_predicted_total"),
        ("vllm", "num_requests_running", "num_requests_waiting", "generation_tokens_total"),
    ):
        yield Metric(f"{prefix}:prompt_tokens_total", "counter", "Prompt tokens evaluated.", prompt_tokens)
        yield Metric(f"{prefix}:{generated_name}", "counter", "Tokens generated.", stats.generated)
        yield Metric(f"{prefix}:{running_name}", "gauge", "Running requests.", running)
        yield Metric(f"{prefix}:{waiting_name}", "gauge", "Waiting requests.", report.waiting)
        name, drafts = f"{prefix}:spec_decode_num", stats.passes - stats.passes_without_draft
        yield Metric(f"{name}_drafts_total", "counter", "Decode calls with a draft.", drafts)
        yield Metric(f"{name}_draft_tokens_total", "counter", "Draft tokens verified.", stats.drafted)
        yield Metric(f"{name}_accepted_tokens_total", "counter", "Draft tokens accepted.", stats.accepted)
        description = "Draft tokens accepted, by position in the draft."
        yield Metric(f"{name}_accepted_tokens_per_pos_total", "counter", description, tuple(stats.accepted_at))


def _llama_server_metrics(report: Report, embedder: Embedder | None) -> Iterator[Metric]:
    stats, passes = report.stats, report.passes
    prompt_rate = report.prompt_tokens / stats.prefill_seconds if stats.prefill_seconds else 0.0
    slots_each, decoding = report.busy / passes if passes else 0.0, stats.decode_seconds
    batches = passes + (embedder.n_passes if embedder is not None else 0)
    for name, kind, description, value in (
        ("prompt_tokens_cached_total", "counter", "Prompt tokens found in the cache.", report.cached_tokens),
        ("prompt_seconds_total", "counter", "Time for prompt processing, in seconds.", stats.prefill_seconds),
        ("tokens_predicted_seconds_total", "counter", "Time from first to last tokens, in seconds.", decoding),
        ("prompt_tokens_seconds", "gauge", "Average prompt tokens per second.", prompt_rate),
        ("predicted_tokens_seconds", "gauge", "Average generated tokens per second.", stats.tokens_per_second or 0.0),
        ("n_decode_total", "counter", "Batches evaluated.", batches),
        ("n_tokens_max", "counter", "Maximum number of tokens in a slot.", report.max_held),
        ("n_busy_slots_per_decode", "gauge", "Average number of busy slots per decode call.", slots_each),
    ):
        yield Metric(f"llamacpp:{name}", kind, description, value)


def _vllm_metrics(report: Report, n_ctx: int) -> Iterator[Metric]:
    tokens = report.prompt_tokens + report.cached_tokens
    used = sum(slot.n_tokens for slot in report.slots) / (n_ctx * len(report.slots))
    yield Metric("vllm:prefix_cache_queries_total", "counter", "Prompt tokens looked up in the cache.", tokens)
    yield Metric("vllm:prefix_cache_hits_total", "counter", "Prompt tokens found in the cache.", report.cached_tokens)
    yield Metric("vllm:kv_cache_usage_perc", "gauge", "Share of the cache in use, 0 to 1.", used)
