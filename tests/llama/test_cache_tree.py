"""Tests of `CacheTree` with llama.cpp, which rejects passes that break its rules or ends the process."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import llama_cpp.llama_cpp as llama
import numpy as np
import pytest
from architectures.files import write_model as write_architecture
from numpy.typing import NDArray
from support.cli_runner import DEMO
from support.mock_target import Clock
from support.tiny_models import WINDOW, write_model

from ngramspec.backend import Logits
from ngramspec.beams.search import SEQUENCES, BeamSearch
from ngramspec.cost.fixed_curves import make_fixed_curve
from ngramspec.cost.store import StoredTimes
from ngramspec.data import ModelError, TargetError
from ngramspec.decoding.decoder import SpeculativeDecoder
from ngramspec.llama import cache_tree
from ngramspec.llama.cache_tree import CacheTree
from ngramspec.llama.passes import MAX_EVALUATE, Passes
from ngramspec.llama.target import Target
from ngramspec.sampling.distribution import logprobs
from ngramspec.tokens import Node


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    kinds = ("llama", "gemma2", "mamba")
    compressed = write_architecture(folder / "deepseek2.gguf", "deepseek2", half=False)
    return {
        **{kind: write_model(folder / f"{kind}.gguf", kind) for kind in kinds},
        "deepseek2": compressed,
        "demo": DEMO,
    }


@pytest.fixture(
    scope="module", params=[pytest.param("demo", marks=pytest.mark.exhaustive), "llama", "gemma2", "deepseek2"]
)
def target(request: pytest.FixtureRequest, files: dict[str, Path]) -> Iterator[Target]:
    # Without flash attention and with an exact cache, only the demo model's quantisation rounds.
    options: dict[str, Any] = {"flash_attn": "off", "cache_type_k": "f32", "cache_type_v": "f32"}
    # With fewer tokens in a batch, a sliding-window cache is smaller and reuses cells sooner.
    with Target(files[request.param], n_ctx=1000, threads=1, n_seq=SEQUENCES, micro_batch=64, **options) as opened:
        yield opened


def some(target: Target, n: int, seed: int = 0) -> list[int]:
    return [int(t) for t in np.random.default_rng(seed).integers(3, target.vocabulary.n_vocab, n)]


def close_to(a: NDArray[np.float32], b: NDArray[np.float32]) -> bool:
    """Return True if logits differ only by rounding (up to 0.1 on quantised weights); most other paths differ by 4."""
    return bool(np.abs(a - b).max() < 0.25 * b.std())


def held_nodes(nodes: Sequence[Node]) -> set[Node]:
    """Return nodes and all their ancestors."""
    held = set()
    for node in nodes:
        at: Node | None = node
        while at is not None and at not in held:
            held.add(at)
            at = at.parent
    return held


def grown(tree: CacheTree, held: set[Node], rng: np.random.Generator) -> list[Node]:
    """Return nodes that are not in the cache, each after its parent, and at most as many as the sequences allow."""
    new: list[Node] = []
    for _ in range(int(rng.integers(1, 12))):
        parents = [*held, *new, *new]
        node = parents[int(rng.integers(len(parents)))].child(int(rng.integers(3, 9)))
        if node in held or node in new:
            continue
        inner = {n.parent for n in [*held, *new, node]}
        if len({*held, *new, node} - inner - {tree.root}) <= tree.leaves:
            new.append(node)
    return sorted((new[int(i)] for i in rng.permutation(len(new))), key=lambda node: node.length)


def bushes(tree: CacheTree, rng: np.random.Generator) -> Iterator[list[Node]]:
    """Yield nodes for passes over a tree of which a random part is kept."""
    held = {tree.root}
    for _ in range(30):
        if new := grown(tree, held, rng):
            yield new
        kept = [node for node in {*held, *new} if node is not tree.root and rng.random() < 0.4][: tree.leaves]
        tree.keep(kept)
        held = held_nodes([tree.root, *kept])
        for node in held:
            node.children = {token: child for token, child in node.children.items() if child in held}


def beams(tree: CacheTree, rng: np.random.Generator) -> Iterator[list[Node]]:
    """Yield nodes for passes of a search far beyond the window: live texts grow in step, with drafts ahead of them."""
    live = [tree.root.child(token) for token in (3, 4, 5)]
    known: set[Node] = set()
    for _ in range(3 * WINDOW):
        missing = [node for node in live if node not in known]
        tree.keep([node if node in known else node.parent for node in live if node.parent is not None])
        ahead: list[Node] = []
        for _ in range(int(rng.integers(0, 6))):
            parents = [*live, *ahead]
            node = parents[int(rng.integers(len(parents)))].child(int(rng.integers(3, 6)))
            if node not in ahead:
                ahead.append(node)
        if new := [*missing, *sorted(ahead, key=lambda node: node.length)]:
            yield new
        known = {*known, *new}
        # Each step leads to drafted nodes and to others.
        before, live = live, []
        for _ in range(3):
            node = before[int(rng.integers(3))].child(int(rng.integers(3, 7)))
            if node not in live:
                live.append(node)
        for node in before:
            node.children = {child.token: child for child in live if child.parent is node}
        for node in live:
            node.children = {}
        live += [before[0].child(9 + i) for i in range(3 - len(live))]


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.exhaustive) for seed in range(2, 12))])
def test_tree_evaluate_returns_logits_of_each_path_alone(seed: int, target: Target) -> None:
    rng = np.random.default_rng(seed)
    prompt = some(target, 420)
    target.sequences[0].prefill(prompt)
    root = Node(None, -1, len(prompt))
    seen: dict[tuple[int, ...], NDArray[np.float32]] = {}
    with closing(target.tree(root)) as tree:
        for new in (beams if tree.windowed else bushes)(tree, rng):
            for node, row in zip(new, tree.evaluate(new), strict=True):
                seen[tuple(node.path())] = row.copy()
    assert target.sequences[0].tokens == prompt
    memory = llama.llama_get_memory(target._ctx)
    assert {llama.llama_memory_seq_pos_max(memory, sequence) for sequence in range(1, SEQUENCES)} == {-1}
    fresh = target.sequences[0].evaluate([5]).copy()
    target.sequences[0].rollback(len(prompt))
    target.sequences[0].prefill(some(target, 20, seed=4))
    target.sequences[0].prefill(prompt)
    assert close_to(fresh, target.sequences[0].evaluate([5]))
    for path in rng.permutation(np.array([*seen], dtype=object))[:60]:
        target.sequences[0].rollback(len(prompt))
        for start in range(0, len(path), MAX_EVALUATE):
            row = target.sequences[0].evaluate(path[start : start + MAX_EVALUATE])[-1]
        assert close_to(seen[tuple(path)], row)


NARROW = 4
"""Sliding window of `StingyLlama`, which is shorter than drafts."""


class StingyLlama:
    """llama.cpp's functions over a cache of [token, position, sequences], which frees every cell that it may free.

    It may free a cell that has left the window of its only sequence, with all earlier cells of that sequence.
    """

    def __init__(self, prompt: Sequence[int]) -> None:
        self.cells = [(token, pos, {0}) for pos, token in enumerate(prompt)]
        self.seen: list[list[int]] = []
        """Tokens that each token of the last pass attends to, including itself."""

    def branch(self, rows: Sequence[tuple[int, int, Sequence[int]]]) -> Logits:
        """Evaluate rows like `Passes.branch`."""
        held: dict[int, list[int]] = {}
        for _, pos, sequences in self.cells:
            for sequence in sequences:
                held.setdefault(sequence, []).append(pos)
        for _, _, of in rows:  # llama-batch.cpp rejects tokens of diverged sequences.
            assert len({(min(held.get(one, [-1])), max(held.get(one, [-1]))) for one in of}) == 1
        for _, pos, sequences in list(self.cells):
            if len(sequences) == 1 and pos <= max(held[sequence := min(sequences)]) + 1 - NARROW:
                self.llama_memory_seq_rm(None, sequence, 0, pos + 1)
        self.cells += [(token, pos, set(of)) for token, pos, of in rows]
        self.seen = []
        for _, last, of in rows:
            inside = range(max(0, last + 1 - NARROW), last + 1)
            path = sorted((pos, token) for token, pos, sequences in self.cells if of[0] in sequences and pos in inside)
            assert [pos for pos, _ in path] == list(inside)
            self.seen.append([token for _, token in path])
        return np.zeros((len(rows), 1), np.float32)

    def llama_memory_seq_rm(self, _memory: object, sequence: int, start: int, end: int) -> bool:
        for _, pos, sequences in self.cells:
            if start <= pos < (end if end >= 0 else math.inf):
                sequences.difference_update(set(sequences) if sequence < 0 else {sequence})
        self.cells = [cell for cell in self.cells if cell[2]]
        return True

    def llama_memory_seq_cp(self, _memory: object, source: int, copy: int, start: int, end: int) -> None:
        for _, pos, sequences in self.cells:
            if source in sequences and start <= pos < end:
                sequences.add(copy)


@pytest.mark.parametrize("seed", range(3))
def test_tree_with_sliding_window_keeps_tokens_each_node_attends_to(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    fake, prompt = StingyLlama(range(100, 130)), [*range(100, 130)]
    monkeypatch.setattr(cache_tree, "llama", fake)
    root = Node(None, -1, len(prompt))
    passes = cast(Passes, SimpleNamespace(memory=None, branch=fake.branch))
    with closing(CacheTree(passes, root, count=9, windowed=True)) as tree:
        for new in beams(tree, np.random.default_rng(seed)):
            tree.evaluate(new)
            assert fake.seen == [[*prompt, *node.path()][-NARROW:] for node in new]


def test_tree_rejects_oversized_batches_and_nodes_not_in_cache(
    files: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with Target(files["llama"], n_ctx=64, threads=1, n_seq=4) as target:
        target.sequences[0].prefill([3, 4])
        root = Node(None, -1, 2)
        with closing(target.tree(root)) as tree:
            a, b = root.child(3), root.child(4)
            tree.evaluate([a, b])
            tree.keep([a])
            for gone in (b, root.child(5)):
                with pytest.raises(ValueError, match="not in the cache"):
                    tree.keep([gone])
            monkeypatch.setattr(llama, "llama_decode", lambda *_: 1)
            with pytest.raises(TargetError, match="returned 1 for 1 tokens"):
                tree.evaluate([a.child(3)])
            monkeypatch.setattr(llama, "llama_memory_seq_rm", lambda *_: False)
            with pytest.raises(TargetError, match="did not cut"):
                tree.keep([])
            monkeypatch.undo()
            few, many = map(root.child, range(6, 10)), [root] * (MAX_EVALUATE + 1)
            for nodes, said in (([], "1 to 64"), (many, "1 to 64"), (few, "3 sequences")):
                with pytest.raises(ValueError, match=said):
                    tree.evaluate(list(nodes))


def score(target: Target, prompt: Sequence[int], tokens: Sequence[int]) -> float:
    """Return the score of a text, evaluated token by token in a separate sequence."""
    row = target.sequences[0].prefill(prompt)
    total = 0.0
    for token in tokens:
        total += logprobs(row, token, 0).logprob
        row = target.sequences[0].evaluate([token])[0]
    return total


def searched(target: Target, beams: int, prompt: Sequence[int], drafts: bool) -> BeamSearch:
    """Return a beam search that has ended."""
    stored = StoredTimes(target.sequences[0])
    stored.times = make_fixed_curve({1: 1.0})
    search = BeamSearch(target, beams, stored=stored if drafts else None, clock=Clock(0.0).perf_counter)
    for _ in search.run(prompt, max_tokens=5 * WINDOW):
        pass
    assert target.sequences[0].tokens == prompt
    return search


@pytest.mark.parametrize("beams", [1, 3])
def test_beam_search_with_drafts_keeps_hypotheses_and_scores(beams: int, target: Target) -> None:
    """The search goes far beyond gemma2's window, and the full cache reuses cells; one beam is greedy decoding."""
    prompt = some(target, 20) * 3
    found = [searched(target, beams, prompt, drafts) for drafts in (False, True)]
    plain, drafted = (search.hypotheses() for search in found)
    assert found[0].stats.passes == 5 * WINDOW - 1
    if beams > 1 or target.weights.architecture != "deepseek2":  # With one beam, deepseek2 never repeats itself.
        assert found[1].stats.passes < found[0].stats.passes
        assert found[1].stats.accepted > 0
    loose = 1.0 if target.weights.path == DEMO else 0.01  # Quantised weights cause more rounding.
    for one, other in zip(plain, drafted, strict=True):
        assert one.score == pytest.approx(other.score, abs=loose)
        assert one.score == pytest.approx(score(target, prompt, one.tokens), abs=loose)
        if target.weights.path != DEMO:
            assert one.tokens == other.tokens
    if beams == 1:
        decoder = SpeculativeDecoder(target, drafter=None, exact="off")
        greedy = [token for step in decoder.generate(prompt, max_tokens=5 * WINDOW) for token in step.tokens]
        assert list(plain[0].tokens) == greedy


def test_tree_evaluate_fills_cache_up_to_promised_length(files: dict[str, Path]) -> None:
    """Separate texts fill the cache to the last cell; one more token would be rejected."""
    with Target(files["llama"], n_ctx=40 + 5 * 30, threads=1, n_seq=SEQUENCES) as target:
        prompt = some(target, 40)
        target.sequences[0].prefill(prompt)
        root = Node(None, -1, len(prompt))
        with closing(target.tree(root)) as tree:
            live = [root] * 5
            for step in range(30):
                live = [node.child(10 + i) for i, node in enumerate(live)]
                tree.evaluate(live)
                tree.keep(live)
                assert step == live[0].length - 41
            ahead = [live[0].child(token) for token in range(3, 3 + 58)]
            assert np.isfinite(tree.evaluate(ahead)).all()


def test_target_tree_rejects_unsupported_models_and_arguments(files: dict[str, Path]) -> None:
    with Target(files["mamba"], n_ctx=64, threads=1, n_seq=4) as target:
        assert not target.can_branch
        target.sequences[0].prefill([3, 4])
        with pytest.raises(ValueError, match="recurrent"):
            target.tree(Node(None, -1, 2))
        with pytest.raises(ModelError, match="recurrent"):
            BeamSearch(target, 2)
    with Target(files["llama"], n_ctx=64, threads=1, n_seq=1) as target:
        assert target.can_branch
        target.sequences[0].prefill([3, 4])
        with pytest.raises(ValueError, match="n_seq"):
            target.tree(Node(None, -1, 2))
    for kind in ("llama", "gemma2"):
        with Target(files[kind], n_ctx=64, threads=1, n_seq=4) as target:
            target.sequences[0].prefill([3, 4])
            with closing(target.tree(Node(None, -1, 2))) as tree:
                assert tree.windowed is (kind == "gemma2")
    with Target(files["llama"], n_ctx=64, threads=1, n_seq=2) as target:
        for prompt in ([], [3, 4, 5]):
            with pytest.raises(ValueError, match="the root of a tree stands for"):
                target.tree(Node(None, -1, len(prompt)))
    for wrong in (0, MAX_EVALUATE + 1):
        with pytest.raises(ValueError, match="n_seq"):
            Target(files["llama"], n_seq=wrong)
