"""`Asking`: passes with tokens beside the text, which leave nothing behind but their logits.

    asking = Asking(api, context, passes, lane, count)
    rows = asking.evaluate([last, a, b], [(0, (x,)), (0, (x, y)), (1, (z,))])   # last x y, and last a z

The text is in the lane's sequence, and what the pass appends to it lies where `SequenceLane.evaluate` would have put
it. Each branch of questions has a sequence of its own, which has caught up with the text before: numbers are copied, no
key and no value is. After the pass the cells of the questions are free again.

llama.cpp is handed in by `ngramspec.llama.target`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ngramspec.backend import Logits, Path
from ngramspec.errors import TargetError
from ngramspec.llama.lane import SequenceLane
from ngramspec.llama.passes import MAX_EVALUATE, Passes
from ngramspec.llama.sequences import cut_sequence


class Asking:
    """Asks beside the text of a lane, which is alone in a cache whose sequences share their cells.

    Args:
        api: the llama_cpp module.
        context: llama.cpp's handle.
        passes: of the context.
        lane: holds the text, in sequence 0; nothing slides out of its cache, and no state in it is recurrent.
        leaves: sequences of the context beside that one.
    """

    def __init__(self, api: Any, context: Any, passes: Passes, lane: SequenceLane, leaves: int) -> None:
        self._api = api
        self._context = context
        self._memory = api.llama_get_memory(context)
        self._passes = passes
        self._lane = lane
        self._leaves = leaves
        self._batch = api.llama_batch_init(MAX_EVALUATE, 0, 1 + leaves)

    def evaluate(self, tokens: Sequence[int], questions: Sequence[Path]) -> Logits:
        """See `ngramspec.backend.Asked.ask`.

        Raises:
            ValueError: too many tokens or branches, or more than the context has room for.
            TargetError: llama.cpp could not evaluate them; the lane is as before.
        """
        lane, n = self._lane, len(tokens) + len(questions)
        lane.settle()
        start = len(lane.tokens)
        if not tokens or n > MAX_EVALUATE or start + n > lane.n_ctx + MAX_EVALUATE:
            raise ValueError(f"{len(tokens)} tokens and {len(questions)} questions do not fit behind {start}")
        owners, used = self._owners(len(tokens), questions)
        if used > self._leaves:
            raise ValueError(f"the questions have {used} branches, more than {self._leaves} sequences can hold")
        for sequence in range(1, used + 1):
            held = self._api.llama_memory_seq_pos_max(self._memory, sequence) + 1
            if held < start:
                self._api.llama_memory_seq_cp(self._memory, 0, sequence, held, start)
        rows = [
            *((token, start + i) for i, token in enumerate(tokens)),
            *((path[-1], start + fork + len(path)) for fork, path in questions),
        ]
        batch = self._batch
        batch.n_tokens = n
        for i, (token, position) in enumerate(rows):
            batch.token[i] = token
            batch.pos[i] = position
            batch.n_seq_id[i] = len(owners[i])
            for j, sequence in enumerate(owners[i]):
                batch.seq_id[i][j] = sequence
            batch.logits[i] = 1
        status = self._api.llama_decode(self._context, batch)
        for sequence in range(1, used + 1):
            cut_sequence(self._api, self._memory, sequence, start)
        if status != 0:
            cut_sequence(self._api, self._memory, 0, start)
            raise TargetError(
                f"llama_decode returned {status} for {n} tokens at position {start}, questions among them"
            )
        lane.cache.decoded(len(tokens))
        lane.tokens += tokens
        return self._passes.logits(n)

    @staticmethod
    def _owners(count: int, questions: Sequence[Path]) -> tuple[list[list[int]], int]:
        """The sequences of each row, and how many there are beside the text's: one for each branch at or behind it."""
        numbers = {question: count + i for i, question in enumerate(questions)}
        owners: list[list[int]] = [*([0] for _ in range(count)), *([] for _ in questions)]
        used = 0
        for fork, path in reversed(questions):
            of = owners[numbers[fork, path]]
            if not of:
                used += 1
                of.append(used)
            if len(path) > 1:
                owners[numbers[fork, path[:-1]]] += of
            else:
                for i in range(fork + 1):
                    owners[i] += of
        return owners, used

    def leave(self) -> None:
        """Empty the sequences beside the text's."""
        for sequence in range(1, 1 + self._leaves):
            cut_sequence(self._api, self._memory, sequence, 0)

    def close(self) -> None:
        """Free the batch, and nothing else."""
        self._api.llama_batch_free(self._batch)
