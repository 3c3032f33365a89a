"""`Sequences`: against a cache that keeps llama.cpp's rules, and on models that llama.cpp runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from support.cli_runner import DEMO
from support.tiny_models import WINDOW, write_model

from ngramspec.backend import Node
from ngramspec.beams.draft import BeamDrafter
from ngramspec.beams.search import SEQUENCES, BeamSearch
from ngramspec.decoding.decoder import SpeculativeDecoder
from ngramspec.errors import ModelError, TargetError
from ngramspec.llama.passes import MAX_EVALUATE
from ngramspec.llama.sequences import Sequences
from ngramspec.llama.target import Target
from ngramspec.sampling.logprobs import logprobs

FAR = 2**31


@dataclass(slots=True)
class Cell:
    token: int
    pos: int
    sequences: set[int] = field(default_factory=set)


class FakeLlama:
    """llama.cpp's functions over a cache of cells; what llama.cpp refuses or asserts fails an assertion here.

    The rules are those of llama-batch.cpp (`llama_batch_allocr::init`) and llama-kv-cache.cpp for a unified cache.
    With a window, every cell is given away that may be: one of a single sequence that lies behind its window. With
    it goes what that sequence has before.
    """

    def __init__(self, prompt: Sequence[int], room: int, count: int, window: int) -> None:
        self.cells = [Cell(token, pos, {0}) for pos, token in enumerate(prompt)]
        self.room = room
        self.count = count
        self.window = window
        self.passes: list[list[list[int]]] = []
        """Of each pass: for each of its tokens what that token sees, itself included."""
        self.status = 0
        self.cuts = True
        self.freed = 0

    def held(self, sequence: int) -> list[Cell]:
        return sorted((cell for cell in self.cells if sequence in cell.sequences), key=lambda cell: cell.pos)

    def llama_batch_init(self, n: int, embd: int, count: int) -> SimpleNamespace:
        assert (embd, count) == (0, self.count)
        ids = [[0] * count for _ in range(n)]
        return SimpleNamespace(n_tokens=0, token=[0] * n, pos=[0] * n, n_seq_id=[0] * n, seq_id=ids, logits=[0] * n)

    def llama_batch_free(self, batch: SimpleNamespace) -> None:
        self.freed += 1

    def llama_decode(self, context: Any, batch: SimpleNamespace) -> int:
        assert context == "context"
        if self.status:
            return self.status
        n = batch.n_tokens
        owners = [batch.seq_id[i][: batch.n_seq_id[i]] for i in range(n)]
        ends = {s: max((cell.pos for cell in self.held(s)), default=-1) for s in range(self.count)}
        starts = {s: min((cell.pos for cell in self.held(s)), default=-1) for s in range(self.count)}
        allowed = {s: set(range(self.count)) for s in range(self.count)}
        for i in range(n):
            assert batch.logits[i] == 1
            assert owners[i]
            assert len({(starts[s], ends[s]) for s in owners[i]}) == 1, "coupled sequences that have diverged"
            for s in owners[i]:
                allowed[s] &= set(owners[i])
                assert allowed[s], "incompatible sequence sets"
        self._give_away(ends)
        after = dict(ends)
        for i in range(n):
            for s in owners[i]:
                after[s] += 1
                assert batch.pos[i] == after[s], "positions that are not consecutive"
            self.cells.append(Cell(batch.token[i], batch.pos[i], set(owners[i])))
        assert len(self.cells) <= self.room
        seen = []
        for i in range(n):
            inside = range(max(0, batch.pos[i] + 1 - self.window), batch.pos[i] + 1)
            path = [cell for cell in self.held(owners[i][0]) if cell.pos in inside]
            assert [cell.pos for cell in path] == list(inside)
            for s in owners[i][1:]:
                assert [cell for cell in self.held(s) if cell.pos in inside] == path
            seen.append([cell.token for cell in path])
        self.passes.append(seen)
        return 0

    def _give_away(self, ends: dict[int, int]) -> None:
        for cell in list(self.cells):
            for s in cell.sequences if len(cell.sequences) == 1 else ():
                if cell.pos <= ends[s] + 1 - self.window:
                    self.llama_memory_seq_rm("memory", s, 0, cell.pos + 1)
                    break

    def llama_memory_seq_rm(self, memory: Any, sequence: int, start: int, end: int) -> bool:
        assert memory == "memory"
        for cell in self.cells:
            if start <= cell.pos < (end if end >= 0 else FAR):
                cell.sequences -= cell.sequences if sequence < 0 else {sequence}
        self.cells = [cell for cell in self.cells if cell.sequences]
        return self.cuts

    def llama_memory_seq_cp(self, memory: Any, source: int, copy: int, start: int, end: int) -> None:
        assert memory == "memory"
        assert source != copy
        for cell in self.held(source):
            if start <= cell.pos < end:
                assert copy not in cell.sequences
                cell.sequences.add(copy)


PROMPT = [7, 8, 9, 7, 8]


def fake(count: int = 8, room: int = 400, window: int = FAR, max_batch: int = 16) -> tuple[FakeLlama, Sequences]:
    llama = FakeLlama(PROMPT, room, count, window)
    tree = Sequences(
        llama,
        "context",
        "memory",
        lambda n: np.zeros((n, 1), np.float32),
        Node(None, -1, len(PROMPT)),
        count=count,
        max_batch=max_batch,
        windowed=window < FAR,
    )
    return llama, tree


def held_nodes(nodes: Sequence[Node]) -> set[Node]:
    held = set()
    for node in nodes:
        at: Node | None = node
        while at is not None and at not in held:
            held.add(at)
            at = at.parent
    return held


@pytest.mark.parametrize("seed", range(20))
def test_every_token_sees_its_own_path(seed: int) -> None:
    rng = np.random.default_rng(seed)
    llama, tree = fake()
    held = {tree.root}
    for _ in range(40):
        new: list[Node] = []
        for _ in range(int(rng.integers(1, 12))):
            parents = [*held, *new, *new]
            parent = parents[int(rng.integers(len(parents)))]
            node = parent.child(int(rng.integers(3, 9)))
            if node in held or node in new:
                continue
            inner = {n.parent for n in [*held, *new, node]}
            if len({*held, *new, node} - inner - {tree.root}) <= tree.leaves:
                new.append(node)
        if not new:
            continue
        order = [int(i) for i in rng.permutation(len(new))]
        new = sorted((new[i] for i in order), key=lambda node: node.length)
        assert tree.evaluate(new).shape == (len(new), 1)
        assert llama.passes[-1] == [[*PROMPT, *node.path()] for node in new]
        held |= set(new)
        # Some of the nodes, with what stands before others of them among them.
        some = [node for node in held if node is not tree.root and rng.random() < 0.4][: tree.leaves]
        tree.keep(some)
        held = held_nodes([tree.root, *some])
        for node in held:
            node.children = {token: child for token, child in node.children.items() if child in held}
        assert len(llama.cells) == len(PROMPT) + len(held) - 1
    tree.close()
    assert [(cell.token, cell.sequences) for cell in llama.cells] == [(token, {0}) for token in PROMPT]
    tree.close()
    assert llama.freed == 1


@pytest.mark.parametrize("seed", range(20))
def test_behind_a_window_only_what_is_kept_ahead_matters(seed: int) -> None:
    """As a search does it: kept are live texts, and the nodes before those whose rows are missing."""
    rng = np.random.default_rng(seed)
    llama, tree = fake(window=4)
    live = [tree.root.child(token) for token in (1, 2, 3)]
    known: set[Node] = set()
    for _ in range(40):
        missing = [node for node in live if node not in known]
        tree.keep([node if node in known else node.parent for node in live if node.parent is not None])
        ahead: list[Node] = []
        for _ in range(int(rng.integers(0, 6))):
            parents = [*live, *ahead]
            node = parents[int(rng.integers(len(parents)))].child(int(rng.integers(3, 6)))
            if node not in ahead:
                ahead.append(node)
        new = [*missing, *sorted(ahead, key=lambda node: node.length)]
        if new:
            tree.evaluate(new)
            assert llama.passes[-1] == [[*PROMPT, *node.path()][-4:] for node in new]
        known = {*known, *new}
        # One step, to drafted nodes and to others.
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


def test_a_line_of_text_stays_in_one_sequence() -> None:
    llama, tree = fake()
    node = tree.root
    for token in range(50):
        node = node.child(token)
        tree.evaluate([node])
        tree.keep([node])
    assert len({s for cell in llama.cells for s in cell.sequences}) == 2  # the prompt's, and that one


def test_what_does_not_fit_is_refused() -> None:
    llama, tree = fake(count=4, max_batch=5)
    with pytest.raises(ValueError, match="1 to 5"):
        tree.evaluate([])
    with pytest.raises(ValueError, match="1 to 5"):
        tree.evaluate([tree.root.child(t) for t in range(6)])
    with pytest.raises(ValueError, match="3 sequences"):
        tree.evaluate([tree.root.child(t) for t in range(4)])
    with pytest.raises(ValueError, match="not in the cache"):
        tree.keep([tree.root.child(1)])
    assert llama.passes == []


def test_a_node_that_was_not_kept_is_gone() -> None:
    _, tree = fake()
    a, b = tree.root.child(1), tree.root.child(2)
    tree.evaluate([a, b])
    tree.keep([a])
    with pytest.raises(ValueError, match="not in the cache"):
        tree.keep([b])


def test_what_llama_cpp_refuses_is_an_error() -> None:
    llama, tree = fake()
    llama.status = 1
    with pytest.raises(TargetError, match="returned 1 for 1 tokens"):
        tree.evaluate([tree.root.child(1)])
    llama.status = 0
    tree.evaluate([tree.root.child(1)])
    llama.cuts = False
    with pytest.raises(TargetError, match="did not cut"):
        tree.keep([])


# --------------------------------------------------------------------------- llama.cpp


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    kinds = ("llama", "gemma2", "mamba")
    return {**{kind: write_model(folder / f"{kind}.gguf", kind) for kind in kinds}, "demo": DEMO}


@pytest.fixture(scope="module", params=["demo", "llama", "gemma2"])
def target(request: pytest.FixtureRequest, files: dict[str, Path]) -> Iterator[Target]:
    # No flash attention and an exact cache: what is left of rounding is the demo model's quantisation.
    options: dict[str, Any] = {"flash_attn": "off", "cache_type_k": "f32", "cache_type_v": "f32"}
    with Target(files[request.param], n_ctx=512, threads=1, n_seq=SEQUENCES, **options) as opened:
        yield opened


def some(target: Target, n: int, seed: int = 0) -> list[int]:
    return [int(t) for t in np.random.default_rng(seed).integers(3, target.n_vocab, n)]


def close_to(a: NDArray[np.float32], b: NDArray[np.float32]) -> bool:
    return bool(np.abs(a - b).max() < 0.1 * b.std())


def test_a_pass_over_a_tree_gives_what_its_paths_give_one_by_one(target: Target) -> None:
    rng = np.random.default_rng(1)
    prompt = some(target, 50)
    target.prefill(prompt)
    root = Node(None, -1, len(prompt))
    live = [root]
    seen: list[tuple[list[int], NDArray[np.float32]]] = []
    with target.sequences(root) as tree:
        for _ in range(12):
            new: list[Node] = []
            for token in some(target, 8, seed=int(rng.integers(10**6))):
                parents = [*live, *new]
                new.append(parents[int(rng.integers(len(parents)))].child(token))
            new = sorted(set(new), key=lambda node: node.length)
            for node, row in zip(new, tree.evaluate(new), strict=True):
                seen.append((node.path(), row.copy()))
            # Of one length, as windowed trees need it.
            length = max(node.length for node in new)
            live = [node for node in new if node.length == length]
            tree.keep(live)
    assert target.tokens == prompt
    fresh = target.evaluate([5]).copy()
    target.rollback(len(prompt))
    target.prefill(some(target, 20, seed=4))
    target.prefill(prompt)
    assert close_to(fresh, target.evaluate([5]))
    target.rollback(len(prompt))
    for path, row in seen:
        assert close_to(row, target.evaluate(path)[-1])
        target.rollback(len(prompt))


def score(target: Target, prompt: Sequence[int], tokens: Sequence[int]) -> float:
    """Of a text, by single tokens in a sequence of its own."""
    row = target.prefill(prompt)
    total = 0.0
    for token in tokens:
        total += logprobs(row, token, 0).logprob
        row = target.evaluate([token])[0]
    return total


@pytest.mark.parametrize("beams", [1, 3])
def test_beams_and_scores_are_the_same_with_drafts(beams: int, target: Target) -> None:
    """Far past the window of gemma2, in a cache so full that cells are given away."""
    prompt = some(target, 20) * 3
    found = []
    for drafter in (None, BeamDrafter()):
        search = BeamSearch(target, beams, drafter=drafter)
        for _ in search.run(prompt, max_tokens=5 * WINDOW):
            pass
        found.append(search)
        assert target.tokens == prompt
    plain, drafted = (search.hypotheses() for search in found)
    assert found[1].stats.passes < found[0].stats.passes == 5 * WINDOW - 1
    assert found[1].stats.accepted > 0
    loose = 1.0 if target.path == DEMO else 0.01  # quantised weights round more
    for one, other in zip(plain, drafted, strict=True):
        assert one.score == pytest.approx(other.score, abs=loose)
        assert one.score == pytest.approx(score(target, prompt, one.tokens), abs=loose)
        assert other.score == pytest.approx(score(target, prompt, other.tokens), abs=loose)
    if target.path != DEMO:
        assert [one.tokens for one in plain] == [one.tokens for one in drafted]


def test_one_beam_is_greedy_decoding(target: Target, tmp_path: Path) -> None:
    prompt = some(target, 20) * 3
    decoder = SpeculativeDecoder(target, drafter=None, calibration_folder=tmp_path)
    greedy = [token for step in decoder.generate(prompt, max_tokens=60) for token in step.tokens]
    for drafter in (None, BeamDrafter()):
        search = BeamSearch(target, 1, drafter=drafter)
        for _ in search.run(prompt, max_tokens=60):
            pass
        assert list(search.hypotheses()[0].tokens) == greedy


def test_the_context_holds_as_much_as_is_promised(files: dict[str, Path]) -> None:
    """Texts that have nothing in common, to the last cell; and one more would be refused."""
    with Target(files["llama"], n_ctx=40 + 5 * 30, threads=1, n_seq=SEQUENCES) as target:
        prompt = some(target, 40)
        target.prefill(prompt)
        root = Node(None, -1, len(prompt))
        with target.sequences(root) as tree:
            live = [root] * 5
            for step in range(30):
                live = [node.child(10 + i) for i, node in enumerate(live)]
                tree.evaluate(live)
                tree.keep(live)
                assert step == live[0].length - 41
            ahead = [live[0].child(token) for token in range(3, 3 + 58)]
            assert np.isfinite(tree.evaluate(ahead)).all()


def test_which_targets_have_no_trees(files: dict[str, Path]) -> None:
    with Target(files["mamba"], n_ctx=64, threads=1, n_seq=4) as target:
        assert not target.can_branch
        target.prefill([3, 4])
        with pytest.raises(ValueError, match="recurrent"):
            target.sequences(Node(None, -1, 2))
        with pytest.raises(ModelError, match="recurrent"):
            BeamSearch(target, 2)
    with Target(files["llama"], n_ctx=64, threads=1, n_seq=1) as target:
        assert target.can_branch
        target.prefill([3, 4])
        with pytest.raises(ValueError, match="n_seq"):
            target.sequences(Node(None, -1, 2))
    for kind in ("llama", "gemma2"):
        with Target(files[kind], n_ctx=64, threads=1, n_seq=4) as target:
            target.prefill([3, 4])
            with target.sequences(Node(None, -1, 2)) as tree:
                assert tree.windowed is (kind == "gemma2")
    with Target(files["llama"], n_ctx=64, threads=1, n_seq=2) as target:
        for prompt in ([], [3, 4, 5]):
            with pytest.raises(ValueError, match="cannot grow"):
                target.sequences(Node(None, -1, len(prompt)))
    for wrong in (0, MAX_EVALUATE + 1):
        with pytest.raises(ValueError, match="n_seq"):
            Target(files["llama"], n_seq=wrong)
