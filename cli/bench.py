"""`ngramspec bench`: how much faster drafting makes a model here, by kind of text, and whether the text stays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Annotated, Any

import typer
from rich.console import RenderableType

from ngramspec.benchmark.against import Rival
from ngramspec.benchmark.alpha import AlphaMeasurement
from ngramspec.benchmark.posted import Measured, Samples, posted
from ngramspec.benchmark.report import Summary, summarise, verdicts
from ngramspec.benchmark.runs import Benchmark, Run
from ngramspec.decoding.decoder import SpeculativeDecoder
from ngramspec.decoding.speculation import Speculation
from ngramspec.drafting import make_drafter
from ngramspec.drafting.hybrid import HybridDrafter
from ngramspec.drafting.model import ModelDrafter
from ngramspec.json_data import encode
from ngramspec.llama.target import Target
from ngramspec.memory import Memory
from ngramspec.memory.names import DEFAULT
from ngramspec.policies import POLICIES, make_policy
from ngramspec.prompts import Case, Prompt, Skipped, load_prompts, prepare
from ngramspec.sampling.settings import Sampling
from ngramspec.tuning.kept import recalled

from .about import exact_mode, load_settings, model_lines, provenance, setup
from .bench_against import check_against, compare_with
from .bench_alpha import GAMMA, alpha_json, alpha_parts, measure_alpha
from .bench_view import show
from .console import Outcome, fail, guarded_stdout, leave, note, outcome, usage_error
from .json_output import JsonOutput, json_option
from .options import DraftOptions, LoadOptions, Model, PromptFiles
from .posts import PostOptions, Posts, command_line
from .sampling_options import SamplingOptions, check_sampling
from .tuned import told
from .view import counting_bar, slow_core

ALL = "all"
REPEATS = 3


@dataclass(frozen=True, slots=True)
class Compared(DraftOptions):
    """What drafts in a benchmark, where `--policy all` is every policy in turn."""

    policy: Annotated[str, typer.Option(help=f"How much to draft: {', '.join(POLICIES)}; {ALL}: compare.")] = "cost"

    def __post_init__(self) -> None:
        self.each()
        if self.policy == ALL and self.no_draft:
            usage_error("--policy all compares drafts; leave out --no-draft")

    def each(self) -> list[DraftOptions]:
        """Options of a policy each."""
        policies = POLICIES if self.policy == ALL else (self.policy,)
        return [DraftOptions(**asdict(self) | {"policy": policy}) for policy in policies]

    def decoders(self, target: Target, memory: Memory | None) -> list[SpeculativeDecoder]:
        """A decoder for each policy, or one alone where nothing can be drafted."""
        first, *others = self.each()
        decoder = first.decoder(target, memory, keep=False)
        if decoder.drafter is None:
            return [decoder]
        known = decoder.calibration
        return [
            decoder,
            *(
                other.quiet_decoder(target, memory, known, drafter=self.unlearnt(decoder, memory).drafter)
                for other in others
            ),
        ]

    def unlearnt(self, decoder: SpeculativeDecoder, memory: Memory | None) -> Speculation:
        """A drafter and a policy like a decoder's, which have learnt nothing."""
        drafter = decoder.drafter
        if isinstance(drafter, ModelDrafter | HybridDrafter):
            drafter = drafter.anew()
        elif drafter is not None:
            drafter = make_drafter(drafter.name, memory=memory)
        return Speculation(drafter, make_policy(decoder.policy.name, self.draft_max))


def bench(
    load: LoadOptions,
    sampling: SamplingOptions,
    draft: Compared,
    post: PostOptions,
    model: Model = None,
    prompts: PromptFiles = None,
    category: Annotated[
        list[str] | None, typer.Option("--category", help="Only this category; may be repeated.")
    ] = None,
    limit: Annotated[
        int | None, typer.Option("--limit", min=1, help="Most prompts per category; default: all.")
    ] = None,
    repeat: Annotated[
        int | None,
        typer.Option("--repeat", min=1, help="Runs of each kind per prompt; default: 3.", show_default=False),
    ] = None,
    predict: Annotated[int, typer.Option("-n", "--predict", min=2, help="Most tokens per run.")] = 128,
    alpha: Annotated[
        bool, typer.Option("--alpha", help="Measure alpha of n-gram counts too, by order; two ways, untimed.")
    ] = False,
    against: Annotated[
        str | None,
        typer.Option(
            "--against",
            metavar="URL",
            help="Compare with a running server of the same model: llama-server, or any that speaks OpenAI's API.",
            show_default=False,
        ),
    ] = None,
    as_json: Annotated[str | None, json_option("every run")] = None,
) -> None:
    """Measure plain against drafted decoding, interleaved, on the same prompts.

    Shown per category: tokens/s of both, their ratio (median, least, most), tokens per pass, acceptance rate,
    acceptance by position in the draft, passes without a draft, and whether the texts are identical (and how close
    the two tokens were where they are not). --json writes every run with machine, model and build.

    To post: --markdown prints a table in llama-bench's style, --svg draws the gains, --html writes one page with the
    gains, acceptance by position, the cost of a pass, how right the drafts' odds were, and a text of each kind with its
    drafts in colour, for which each kind's first prompt is run once more. All of them tell the line that reproduces it.

    A ratio of 1.20x means that drafting emits 1.2 times as many tokens per second. "theory" is what Leviathan et
    al.'s formula expects from the measured acceptance and cost of a pass, drafts being free.

    --against URL asks a running server for the same prompts, in turns with us, each once, and shows tokens per second
    of both and whether the texts are the same. A key for it is read from OPENAI_API_KEY.

    --policy all runs every prompt with every policy, beside plain decoding, in rotating order.

    --alpha decodes every prompt once more per n-gram order, with the counts of the context as q and drafts of
    --draft-max (4): alpha by its definition, the mean of sum min(p, q), and as inferred from what was accepted.

    With --exact on both sides run in exact mode, and its price against ordinary plain decoding is measured too.
    --no-draft compares plain decoding with itself: how far the machine's own noise moves the ratios.
    """
    chosen = sampling.sampling()
    acceptance = sampling.acceptance(chosen)
    draft.check(acceptance)
    if against is not None:
        check_against(chosen, {"repeat": repeat, "alpha": alpha, "policy all": draft.policy == ALL, **asdict(post)})
    selected = _select(load_prompts(prompts), category or [], limit)
    with JsonOutput(as_json) as output, Posts(post, as_json) as posts:
        found = load.find(model)
        kept = recalled(load.tuned_file(found.path))
        tuned, load = told(kept, left_out=load.no_tuned), load.using(kept)
        target = load.load(found, draft_max=draft.longest, head=draft.mtp)
        check_sampling(target, chosen)
        memory = _memory(draft, target)
        decoder, *others = draft.decoders(target, memory)
        cases, skipped = _cases(target, selected, predict)
        ordinary = replace(load, exact="off", ctx_size=target.n_ctx)
        default = SpeculativeDecoder(ordinary.load(found), drafter=None, exact="off") if target.exact == "on" else None
        settings = predict, repeat or REPEATS, chosen, acceptance, default, others
        benchmark = Benchmark(decoder, cases, *settings, unlearnt=partial(draft.unlearnt, memory=memory))
        if against is not None:
            heading = None if posts.silent else _heading(target, benchmark, chosen)
            compare_with(Rival(against, target), target, benchmark, heading, output)
            return
        note(
            f"{benchmark.total} runs of up to {predict} tokens; prompts: {len(cases)}"
            + (f", skipped: {len(skipped)}" if skipped else "")
        )
        ended = _measure(benchmark)
        orders = None
        if alpha and not ended.code:
            if not target.can_rollback:
                usage_error("--alpha needs drafts, and this model's state cannot be taken back")
            gamma = draft.draft_max or GAMMA
            measurement = AlphaMeasurement(target, chosen, gamma, exact=target.exact)
            ended = measure_alpha(measurement, cases, predict)
            orders = measurement.orders
        samples = Samples(benchmark) if posts.page and decoder.drafter is not None and not ended.code else None
        if samples is not None:
            ended = _sample(samples)
        summaries = {
            policy: summarise(benchmark.runs_of(policy), drafted.calibration.curve)
            for policy, drafted in benchmark.policies.items()
        }
        try:
            if not posts.silent:
                more = [] if orders is None else alpha_parts(orders, greedy=chosen.greedy)
                _show(target, benchmark, summaries, skipped, chosen, tuned, more)
        finally:
            # Even where the reader of the table has gone, as head does.
            if output.wanted:
                more_data = {
                    "selection": {"prompts": str(prompts) if prompts else None, "categories": category, "limit": limit},
                    "load": asdict(load),
                    "memory": {"name": draft.memory or DEFAULT, "tokens": memory.stored} if memory else None,
                    "alpha": None if orders is None else alpha_json(orders),
                    "calibration": None if samples is None else samples.reliability.to_json(),
                }
                output.write(more_data | _document(target, benchmark, summaries, skipped, chosen))
            own = {
                **{
                    "--prompts": prompts,
                    "--category": category,
                    "--limit": limit,
                    "-n": predict,
                    "--repeat": benchmark.repeat,
                },
                "-s": None if chosen.greedy else chosen.seed,
            }
            typed = command_line("bench", [model], own, sampling, draft, load)
            posts.write(lambda: posted(setup(target, found.label), typed, _measured(benchmark, summaries, samples)))
    leave(ended)


def _memory(draft: Compared, target: Target) -> Memory | None:
    """The memory to draft from, if there is one."""
    memory = draft.open_memory(target, keep=False)
    if memory is not None and memory.stored:
        note(f"drafting from a memory of {memory.stored} tokens too; --no-memory leaves it out")
    return memory


def _cases(target: Target, selected: Sequence[Prompt], predict: int) -> tuple[list[Case], list[Skipped]]:
    """What can be run of the prompts, and what cannot; ends the program if nothing can."""
    cases, skipped = prepare(target, selected, predict, target.n_ctx)
    if not cases:
        first = skipped[0]
        fail(f"no prompt left of {len(selected)}; {first.category}/{first.id}: {first.reason}")
    return cases, skipped


def _select(prompts: Sequence[Prompt], categories: Sequence[str], limit: int | None) -> list[Prompt]:
    known = list(dict.fromkeys(p.category for p in prompts))
    for category in categories:
        if category not in known:
            usage_error(f"no category {category!r}; there are: {', '.join(known)}")
    wanted = [c for c in known if not categories or c in categories]
    return [p for c in wanted for p in [p for p in prompts if p.category == c][:limit]]


def _measure(benchmark: Benchmark) -> Outcome:
    """Make the runs; what was measured before an interruption stays in `benchmark`."""
    with outcome() as ended, counting_bar(benchmark.total, "warming up", still=True) as done:
        benchmark.warm_up()
        for run in benchmark.measure():
            done(f"{run.category}/{run.prompt}")
    return ended


def _sample(samples: Samples) -> Outcome:
    """Draft a text of each kind to look at; what was taken before an interruption stays in `samples`."""
    with outcome() as ended, counting_bar(samples.total, "texts to look at", still=True) as done:
        for sample in samples.run():
            done(f"{sample.category}/{sample.prompt}")
    return ended


def _measured(benchmark: Benchmark, summaries: Mapping[str, Sequence[Summary]], samples: Samples | None) -> Measured:
    made = len(benchmark.runs)
    return Measured(
        summaries,
        {policy: drafted.calibration.curve for policy, drafted in benchmark.policies.items()},
        benchmark.caveat,
        drafts=benchmark.drafted.drafter is not None,
        unfinished=None if benchmark.complete else f"stopped after {made} of {benchmark.total} runs",
        samples=samples,
    )


def _show(
    target: Target,
    benchmark: Benchmark,
    summaries: Mapping[str, Sequence[Summary]],
    skipped: Sequence[Skipped],
    sampling: Sampling,
    tuned: str,
    more: Sequence[RenderableType],
) -> None:
    probe = benchmark.drafted.calibration.probe
    order = (
        f"{benchmark.repeat} runs of each kind per prompt, in rotating order; no text is drafted by what has seen it"
    )
    heading = [*_heading(target, benchmark, sampling), order, f"tuned: {tuned}"]
    with guarded_stdout():
        largest = probe.max_difference if probe else None
        show(benchmark, summaries, heading, skipped, largest_difference=largest, more=more)


def _heading(target: Target, benchmark: Benchmark, sampling: Sampling) -> list[str]:
    decoder = benchmark.drafted
    how = "greedy" if sampling.greedy else f"temperature {sampling.temperature}, seed {sampling.seed}"
    drafter = decoder.drafter.name if decoder.drafter else "none"
    policies = ("policy " if len(benchmark.policies) == 1 else "policies ") + ", ".join(benchmark.policies)
    lines = [
        *model_lines(target),
        f"{how}; drafter {drafter}, {policies}; up to {benchmark.max_tokens} tokens per run",
    ]
    if decoder.footing.same:
        lines.append(exact_mode(decoder.footing.sizes))
    if decoder.drafter and (slow := slow_core()) is not None:
        lines.append(slow)
    return lines


def _document(
    target: Target,
    benchmark: Benchmark,
    summaries: Mapping[str, Sequence[Summary]],
    skipped: Sequence[Skipped],
    sampling: Sampling,
) -> dict[str, Any]:
    """Everything measured, and everything it depends on."""
    decoder, calibration = benchmark.drafted, benchmark.drafted.calibration
    rule = benchmark.acceptance.resolve(sampling)
    return {
        **provenance(target),
        "complete": benchmark.complete,
        "verdict": "\n".join(verdicts(summaries, benchmark.caveat)),
        "settings": {
            "max_tokens": benchmark.max_tokens,
            "repeat": benchmark.repeat,
            "sampling": encode(asdict(sampling)),
            "verify": rule.name,
            "lossy": rule.lossy,
            "drafter": decoder.drafter.name if decoder.drafter else None,
            "policies": list(benchmark.policies),
            "exact": decoder.exact,
            "exact_sizes": calibration.exact_sizes,
            **load_settings(target),
            "decoder": "one of each kind for all prompts, in order; at each repeat it has learnt nothing",
        },
        "cost_curve_seconds": {
            policy: drafted.calibration.curve.to_json() if drafted.calibration.curve else None
            for policy, drafted in benchmark.policies.items()
        },
        "probe": calibration.probe.to_json() if calibration.probe else None,
        "summaries": [{"policy": policy, **s.to_json()} for policy, rows in summaries.items() for s in rows],
        "differences": [asdict(d) for d in benchmark.differences],
        "skipped": [asdict(s) for s in skipped],
        "prefills": [asdict(p) for p in benchmark.prefills],
        "runs": [_run(run) for run in benchmark.runs],
    }


def _run(run: Run) -> dict[str, Any]:
    stats = asdict(run.stats)
    # In the counters `seconds` is that of target passes, here that of the run; and its prefill is timed outside too.
    stats["pass_seconds"] = stats.pop("seconds")
    del stats["prefill_seconds"]
    return {
        "category": run.category,
        "prompt": run.prompt,
        "kind": run.kind,
        "policy": run.policy,
        "repeat": run.repeat,
        "seconds": run.seconds,
        "prefill_seconds": run.prefill_seconds,
        "tokens_per_second": run.tokens_per_second,
        **stats,
        "batches": {str(size): passes for size, passes in sorted(run.batches.items())},
        "stop": run.stop,
    }
