"""`ngramspec bench`: speed of a model with and without drafts by kind of text, and a comparison of the texts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from ngramspec.data import CLASS_FORM, encode, is_user_class
from ngramspec.decoding.decoder import SpeculativeDecoder
from ngramspec.drafting import make_drafter
from ngramspec.drafting.draft import Drafter
from ngramspec.drafting.draft_model.hybrid import HybridDrafter
from ngramspec.drafting.draft_model.model import ModelDrafter
from ngramspec.instruments.benchmark.against import SHARED_SETTINGS, Pair, RemoteServer, against_report, compare
from ngramspec.instruments.benchmark.figures import Summary, benchmark_report, summarise
from ngramspec.instruments.benchmark.runs import Benchmark
from ngramspec.instruments.prompts import Prompt, load_prompts, prepare
from ngramspec.llama.target import Target
from ngramspec.loading.load import LoadedModel, find, open_resolved, open_target
from ngramspec.loading.settings import LoadSettings
from ngramspec.memory.memory import DEFAULT
from ngramspec.policies import POLICIES, make_policy
from ngramspec.policies.policy import Policy
from ngramspec.sampling.settings import Sampling, allow_range, option, options

from .conditions import NO_MEMORY, Conditions, exact_mode, load_settings, tuning_line
from .console import note, pluralize, usage_error
from .options import DISPLAY, PROMPTS, Model, SamplingOptions, check_sampling
from .show import Output, command_line, run_pieces, slow_core

ALL = "all"


def bench(
    load: Annotated[LoadSettings, tuple(name for name in options(LoadSettings) if name != "policy")],
    sampling: SamplingOptions,
    output: Annotated[Output, {"as_json": "Write every run as JSON; -: to stdout instead of the table."}],
    model: Model = None,
    policy: str = option(
        "cost",
        metavar=f"NAME|{CLASS_FORM}",
        help=f"Policy for the draft length: {', '.join(POLICIES)}, your own class, or {ALL} to compare them.",
    ),
    prompts: Path | None = PROMPTS,
    category: list[str] | None = option(None, help="Run only this category; repeatable."),
    limit: int | None = option(
        None, help="Maximum number of prompts per category; default: all.", allowed=allow_range(1)
    ),
    repeat: int | None = option(
        None, help="Number of runs with and without drafts per prompt; default: 3.", allowed=allow_range(1)
    ),
    predict: int = option(
        128, "-n", "--predict", "--n-predict", help="Maximum number of tokens per run.", allowed=allow_range(2)
    ),
    against: str | None = option(
        None,
        metavar="URL",
        help="Compare with a running server of the same model (llama-server or an OpenAI-compatible one).",
    ),
) -> None:
    """Measure decoding with and without drafts, interleaved, on the same prompts.

    The report shows for each category: tokens per second with and without drafts, their ratio, tokens per pass, the
    acceptance rate, acceptance by position in the draft, passes without a draft, and whether the texts are identical
    (if not, how close the two tokens were). A pass is one decode call of the model. --json writes every run with
    machine, model and build.

    A ratio of 1.20x means that drafting produces 1.2 times as many tokens per second. It is called a gain only if the
    pairs of runs show it: the last line and the column "gain" contain an interval for the median ratio, from a sign
    test (2 % at each end, shared by the categories), or state that there is no clear difference.

    To share the results, --markdown prints the table, --svg draws the gains, and --html writes a page with the gains,
    acceptance by position, the cost of a pass, and one text per category with its drafts in colour. All reports name
    the model file, --exact, threads, memory, the load by other programs, and the command that reproduces the results.

    --against URL sends the same prompts to a running server, once each, alternating with ngramspec. It shows the tokens
    per second of both and whether the texts are the same. The API key is read from OPENAI_API_KEY.

    --policy all runs every prompt with every policy and without drafts, in rotating order.

    With --exact on, all runs use exact mode, and its cost relative to ordinary decoding is measured too. --no-draft
    compares plain decoding with itself, which shows how much noise there is in the ratios on this machine.
    """
    sampling_settings, acceptance = sampling.choose(load)
    load, more_policies = _with_policies(load, policy)
    if against is not None:
        posts = {"markdown": output.markdown, "svg": output.svg, "html": output.html}
        _check_against(sampling_settings, {"repeat": repeat, "policy all": policy == ALL, **posts})
    output.check()
    selection = _select(load_prompts(prompts), category or [], limit)
    source = find(model, load, DISPLAY)
    tuning = tuning_line(source.path, load)
    loaded_model = open_resolved(source, load, DISPLAY, learn=False)
    target, memory, load = loaded_model.target, loaded_model.memory, loaded_model.settings
    check_sampling(target.vocabulary, sampling_settings)
    memory_name, drafted_from = None, NO_MEMORY
    if memory and memory.n_stored_tokens:
        memory_name = load.memory or DEFAULT
        drafted_from = f"memory {memory_name}, {memory.n_stored_tokens} tokens"
        note(f"also drafting from a memory of {memory.n_stored_tokens} tokens; --no-memory disables it")
    cases, skipped = prepare(target.vocabulary, selection, predict, target.n_ctx)
    default = _open_ordinary(target, source.path, load) if target.exact == "on" else None
    settings = predict, repeat or 3, sampling_settings, acceptance, default, more_policies
    benchmark = Benchmark(loaded_model.decoder, cases, *settings, make_untrained=partial(_make_untrained, loaded_model))
    conditions = Conditions(target, source.label, load.exact, drafted_from)
    own = {
        "--prompts": prompts,
        "--category": category,
        "--limit": limit,
        "-n": predict,
        "--repeat": None if against else benchmark.repeat,
        "--policy": None if policy == "cost" else policy,
        "-s": None if sampling_settings.greedy else sampling_settings.seed,
        "--memory": memory_name,
        "--no-memory": load.no_memory or (memory is not None and memory_name is None),
        "--against": against,
    }
    command = command_line("bench", [model], own, sampling, replace(load, policy="cost"))
    if against is not None:
        pairs: list[Pair] = []
        server = RemoteServer(against, target.vocabulary)
        outcome = run_pieces(_ask(benchmark, server, pairs), len(cases), "warming up")
        if pairs:
            setup = [*conditions.lines, *_heading(benchmark)]
            comparison = against_report(server.url, command, setup, pairs, len(cases))
            document = conditions.to_json(command, load) | {"against": server.url, "pairs": pairs}
            output.write(comparison, document, outcome)
        outcome.reraise()
        return
    left_out = f", skipped: {len(skipped)}" if skipped else ""
    note(f"{benchmark.total} runs of up to {predict} tokens; prompts: {len(cases)}{left_out}")
    outcome = run_pieces(_runs(benchmark), benchmark.total, "warming up")
    summaries = summarise(benchmark.runs, list(benchmark.policies))
    order = "in rotating order; every repeat begins with a fresh drafter"
    runs = f"{pluralize(benchmark.repeat, 'run')} with and without drafts per prompt, {order}"
    setup = [*conditions.lines, *_heading(benchmark), runs, f"tuned: {tuning}"]
    title = f"{source.label}: decoding with and without drafts"
    report = benchmark_report(title, conditions.origin, command, setup, benchmark, summaries, skipped)
    inputs = {
        "selection": {"prompts": str(prompts) if prompts else None, "categories": category, "limit": limit},
        "memory": {"name": load.memory or DEFAULT, "tokens": memory.n_stored_tokens} if memory else None,
    }
    document = inputs | conditions.to_json(command, load) | _document(target, benchmark, summaries)
    document |= {"verdict": "\n".join(report.details[-len(benchmark.policies) :]), "skipped": skipped}
    output.write(report, document, outcome)


def _check_against(sampling: Sampling, excluded: Mapping[str, object]) -> None:
    """End the program if the server does not support the sampling or an option applies only to ngramspec's runs."""
    if conflicts := [f"--{name}" for name, value in excluded.items() if value]:
        usage_error(f"--against cannot be combined with {', '.join(conflicts)}")
    if sampling != Sampling(**{name: getattr(sampling, name) for name in SHARED_SETTINGS}):
        usage_error("--against supports only the sampling options --temp, --top-k, --top-p, --min-p and -s")


def _with_policies(load: LoadSettings, policy: str) -> tuple[LoadSettings, list[str]]:
    if policy not in (*POLICIES, ALL) and not is_user_class(policy):
        usage_error(f"unknown policy {policy!r}; choose one of: {', '.join(POLICIES)}, {ALL}, or {CLASS_FORM}")
    first, *rest = POLICIES if policy == ALL else [policy]
    if rest and load.no_draft:
        usage_error("--policy all cannot be combined with --no-draft")
    return replace(load, policy=first), rest


def _open_ordinary(target: Target, path: Path, load: LoadSettings) -> SpeculativeDecoder:
    """Load the model of a target in exact mode again, without that mode, for plain decoding."""
    changes = {"exact": "off", "ctx_size": target.n_ctx, "mtp": False, **target.weights.plan.fixed}
    # The notes are those of the first target.
    second = open_target(path, replace(load.of_target, **changes), replace(DISPLAY, note=lambda _: None))
    return SpeculativeDecoder(second, drafter=None, exact="off")


def _select(prompts: Sequence[Prompt], categories: Sequence[str], limit: int | None) -> list[Prompt]:
    groups: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        groups.setdefault(prompt.category, []).append(prompt)
    for category in categories:
        if category not in groups:
            usage_error(f"unknown category {category!r}; choose from: {', '.join(groups)}")
    return [p for category, group in groups.items() if not categories or category in categories for p in group[:limit]]


def _make_untrained(loaded_model: LoadedModel, policy: str) -> tuple[Drafter | None, Policy]:
    """Return a new drafter like the one that was opened, and a new policy; both without learned state."""
    drafter = loaded_model.decoder.drafter
    if isinstance(drafter, ModelDrafter | HybridDrafter):
        drafter = drafter.fresh_copy()
    elif drafter is not None:
        drafter = make_drafter(drafter.name, memory=loaded_model.memory, vocabulary=loaded_model.target.vocabulary)
    return drafter, make_policy(policy, loaded_model.settings.draft_max)


def _heading(benchmark: Benchmark) -> Iterator[str]:
    decoder, sampling = benchmark.drafted, benchmark.sampling
    how = "greedy" if sampling.greedy else f"temperature {sampling.temperature}, seed {sampling.seed}"
    drafter = decoder.drafter.name if decoder.drafter else "none"
    policies = ("policy " if len(benchmark.policies) == 1 else "policies ") + ", ".join(benchmark.policies)
    yield f"{how}; drafter {drafter}, {policies}; up to {benchmark.max_tokens} tokens per run"
    if decoder.exactness.bit_identical:
        yield exact_mode(decoder.exactness.sizes)
    if decoder.drafter and (slow := slow_core()) is not None:
        yield slow


def _runs(benchmark: Benchmark) -> Iterator[str]:
    benchmark.warm_up()
    for run in benchmark.measure():
        yield f"{run.category}/{run.prompt}"


def _ask(benchmark: Benchmark, server: RemoteServer, pairs: list[Pair]) -> Iterator[str]:
    """Run every prompt on the server and the first decoder of a benchmark, and collect the pairs of answers."""
    # If the server is not reachable, the benchmark fails here, before a minute of measuring.
    server.ask(benchmark.cases[0].tokens[:2], 2, benchmark.sampling)
    benchmark.warm_up()
    benchmark.forget()
    arguments = benchmark.cases, benchmark.max_tokens, benchmark.sampling, benchmark.acceptance
    for pair in compare(benchmark.drafted, server, *arguments):
        pairs.append(pair)
        yield f"{pair['category']}/{pair['prompt']}"


def _document(target: Target, benchmark: Benchmark, summaries: Sequence[Summary]) -> dict[str, Any]:
    decoder, sampling = benchmark.drafted, benchmark.sampling
    return {
        "complete": benchmark.complete,
        "settings": {
            "max_tokens": benchmark.max_tokens,
            "repeat": benchmark.repeat,
            "sampling": encode(asdict(sampling)),
            "acceptance": benchmark.acceptance.rule(sampling),
            "lossy": benchmark.acceptance.lossy,
            "drafter": decoder.drafter.name if decoder.drafter else None,
            "policies": list(benchmark.policies),
            "exact": decoder.exact,
            "exact_sizes": decoder.kernels.exact_sizes,
            **load_settings(target),
            "decoder": "one with and one without drafts for all prompts, in order; each repeat starts untrained",
        },
        "pass_costs": {policy: decoder.times.to_json() for policy, decoder in benchmark.policies.items()},
        "probe": encode(decoder.kernels.probe),
        "summaries": [asdict(summary) for summary in summaries],
        "differences": benchmark.differences,
        "prefills": benchmark.prefills,
        "runs": [run.to_json() for run in benchmark.runs],
    }
