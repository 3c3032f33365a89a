"""`ngramspec replay`: what drafting would have gained on recorded conversations."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer

import ngramspec
from ngramspec.cost.given import CURVES, SWITCH, GivenCurve, find_curves
from ngramspec.drafting import DEFAULT, make_drafter
from ngramspec.drafting.draft import Drafter
from ngramspec.llama.target import Target
from ngramspec.llama.vocabulary import Vocabulary
from ngramspec.policies import make_policy
from ngramspec.replay.posted import posted
from ngramspec.replay.replay import Replay, check_replayable
from ngramspec.replay.report import Comparison, Figures, Samples
from ngramspec.replay.transcripts import MAX_RESPONSE, MAX_TOTAL

from .console import Outcome, guarded_stdout, leave, note, outcome, usage_error
from .json_output import JsonOutput, json_option
from .options import DrafterName, DraftMax, LoadOptions, PolicyName, Threads, Workers, open_vocabulary
from .posts import PostOptions, Posts, command_line
from .replay_input import MEASURED, measured_curve, named_curves, read_transcripts, record
from .replay_view import show
from .view import counting_bar, slow_core

SHOWN = (2, 3, 4, 6, 8, 12, 16, 32, 64)
"""Sizes of a batch whose cost is printed."""

UNNAMED = "no --vocab or --model: the texts are cut into the tokens of"


@dataclass(frozen=True, slots=True)
class DraftingOptions:
    """What drafts in a replay."""

    drafter: DrafterName = DEFAULT
    policy: PolicyName = "cost"
    draft_max: DraftMax = None
    memory: Annotated[
        Literal["on", "off"], typer.Option(help="Remember the answers of earlier conversations of the run.")
    ] = "off"

    def __post_init__(self) -> None:
        try:
            check_replayable(self.make(), make_policy(self.policy, self.draft_max))
        except ValueError as error:
            usage_error(str(error))

    def make(self) -> Drafter:
        """A drafter that has seen nothing yet."""
        return make_drafter(self.drafter, memory=self.memory == "on")

    def replay(self, curve: GivenCurve) -> Replay:
        """A replay by a curve, with a drafter of its own."""
        return Replay(self.make(), self.policy, self.draft_max, curve=curve)


@dataclass(frozen=True, slots=True)
class CostOptions:
    """What a pass costs in a replay: by given curves, or on a model."""

    curve: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME|FILE",
            help="What a batch costs by its size; may be repeated, one replay each. A file with JSON, {size: cost, ...}"
            f" or {{name: {{...}}, ...}}, in which {SWITCH!r} beside the sizes is the cost of a change of size; or one"
            f" of: {', '.join(CURVES)}.",
            show_default=False,
        ),
    ] = None
    model: Annotated[
        str | None, typer.Option(metavar="MODEL", help="Measure the costs of this model.", show_default=False)
    ] = None
    ctx_size: Annotated[
        int | None, typer.Option("-c", "--ctx-size", min=16, max=2**24, help="Context of --model in tokens.")
    ] = None
    gpu_layers: Annotated[
        int, typer.Option("-ngl", "--gpu-layers", min=-1, max=9999, help="Layers of --model on the GPU; -1: all.")
    ] = -1
    rpc: Workers = None
    threads: Threads = None

    def __post_init__(self) -> None:
        if self.model is None and (self.ctx_size, self.gpu_layers, self.rpc, self.threads) != (None, -1, None, None):
            usage_error("-c, -ngl, --rpc and -t load a model: name it with --model")

    def load(self) -> Target | None:
        """The model, if one is asked for."""
        if self.model is None:
            return None
        load = LoadOptions(ctx_size=self.ctx_size, gpu_layers=self.gpu_layers, rpc=self.rpc, threads=self.threads)
        return load.load(load.find(self.model))

    def curves(self, target: Target | None) -> dict[str, GivenCurve]:
        """The given curves, and the model's own."""
        curves = named_curves(self.curve or [])
        if target is not None:
            curves[MEASURED] = measured_curve(target)
        if not curves:
            note("no --curve or --model: a batch is taken to cost what one token costs (flat), more than can be had")
            curves = find_curves("flat")
        return curves


def replay(
    drafting: DraftingOptions,
    cost: CostOptions,
    post: PostOptions,
    files: Annotated[
        list[str],
        typer.Argument(metavar="FILE...", help="Recorded conversations, JSONL or plain text pairs; -: from stdin."),
    ],
    vocab: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.gguf",
            help="Whose tokens; weights need not be in it. Default: the model's, or the default model's.",
            show_default=False,
        ),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Most conversations per category, drawn at random once; default: all.")
    ] = None,
    no_oracle: Annotated[bool, typer.Option("--no-oracle", help="Leave the copy-oracle out.")] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Refuse broken entries instead of skipping them.")] = False,
    with_texts: Annotated[
        bool, typer.Option("--with-texts", help="Show in --html what was drafted of the first answer of each category.")
    ] = False,
    as_json: Annotated[str | None, json_option("all figures")] = None,
) -> None:
    """Replay recorded conversations: what would drafting have gained?

    The answers are taken to be a model's own greedy output, so it takes no model, only a vocabulary. A pass over n
    tokens costs what a curve says, and the policy drafts by that curve. "oracle" is the most that any drafter could
    gain that copies one span of the context per pass. Shown per category, overall, and as the mean of the categories
    (macro): tokens per pass, acceptance rate, passes without a draft, the speedup; microseconds of drafting per pass
    and per token of the prompt; acceptance by position; and how well the predicted acceptance fits the observed one.

    A file is JSON lines, one JSON array, or one object, of {"messages": [...], "response": "..."}, of conversations
    that end with the assistant's message, of {"prompt": "...", "response": "..."}, or of OpenAI's requests and
    responses; or plain text in pairs, after lines "=== prompt" and "=== response".

    Ctrl-C shows what was replayed so far.

    To post: --markdown prints a table, --svg draws the gains, --html writes one page with all figures. Nothing that the
    conversations say is in them, unless --with-texts puts the first answer of each category on the page.
    """
    if with_texts and post.html is None:
        usage_error("--with-texts is for the page that --html writes")
    named_curves(cost.curve or [])
    with ExitStack() as stack:
        output, posts = stack.enter_context(JsonOutput(as_json)), stack.enter_context(Posts(post, as_json))
        transcripts = read_transcripts(files, strict=strict)
        target = cost.load()
        if target is not None:
            stack.enter_context(target)
        vocabulary: Vocabulary = (
            target if target and not vocab else stack.enter_context(open_vocabulary(vocab, None, UNNAMED))
        )
        recordings = record(transcripts, vocabulary, limit)
        curves = cost.curves(target)
        replays = {name: drafting.replay(curve) for name, curve in curves.items()}
        samples = Samples(vocabulary.piece) if with_texts else None
        comparison = Comparison(recordings, drafting.drafter, replays, curves, oracle=not no_oracle, samples=samples)
        ended = _run(comparison, len(recordings))
        document = {
            "ngramspec": ngramspec.__version__,
            "files": files,
            "vocabulary": str(vocabulary.path),
            "model": None if target is None else str(target.path),
            "settings": {**asdict(drafting), "limit": limit},
            "skipped": {"broken": len(transcripts.broken), "empty": transcripts.empty},
            **comparison.document(),
        }
        try:
            if not posts.silent:
                with guarded_stdout():
                    _show(document, curves, len(recordings))
        finally:
            # Even where the reader of the table has gone, as head does.
            if output.wanted:
                output.write(document)
            own = {"--vocab": vocab, "--limit": limit, "--no-oracle": no_oracle, "--strict": strict}
            typed = command_line("replay", files, own, drafting, cost)
            posts.write(lambda: posted(document, vocabulary.path.name, typed, samples))
    leave(ended)


def _run(comparison: Comparison, total: int) -> Outcome:
    """Replay them all; what was replayed before an interruption stays."""
    with outcome() as ended, counting_bar(total, "replaying", still=False) as done:
        for recording in comparison.run():
            done(recording.category)
    return ended


def _show(document: Figures, curves: Mapping[str, GivenCurve], total: int) -> None:
    settings = document["settings"]
    heading = [
        f"{document['transcripts']} conversations, {document['decode_tokens']} tokens to decode,"
        f" {document['prompt_tokens']} tokens of prompts; tokens of {document['vocabulary']}",
        f"drafter {settings['drafter']}, policy {settings['policy']}, memory {settings['memory']}; one drafter for all"
        " conversations, in order",
        f"a response's first token is the prefill's; responses are cut at {MAX_RESPONSE} tokens, prompts at the front"
        f" so that both have {MAX_TOTAL}",
    ]
    if not document["complete"]:
        heading.append(f"INCOMPLETE: stopped after {document['transcripts']} of {total} conversations")
    if (slow := slow_core()) is not None:
        heading.append(slow)
    sections = {}
    for name, curve in curves.items():
        rows = document["results"][f"{settings['drafter']}@{name}"]
        costs = " ".join(f"{size}:{curve.ratio(size):.2f}" for size in SHOWN)
        about = CURVES[name][1] if name in CURVES else "from a file"
        if name == MEASURED:
            about = "passes of the model, measured here before the replay"
        switch = f"; a change of size: {curve.switch:.2f}" if curve.switch else ""
        sections[name] = f"{about}\nT(n)/T(1): {costs}{switch}", rows
    oracle = {
        category: {name: row[name]["oracle_copy1"] for name in row}
        for category, row in (document["oracle"] or {}).items()
    }
    show(heading, sections, oracle)
