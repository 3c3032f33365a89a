"""How llama.cpp splits a pass over several sequences into the batches that it really evaluates, one after another.

Where all sequences share one pool of cells, and nothing else is kept of them, it takes the tokens as they come. Else
every batch holds equally many tokens of each of its sequences (`llama_batch_allocr::split_equal`): it begins with the
first sequence that has tokens left, takes in the others, and ends with the first that has no more. Read in the source
of llama-cpp-python 0.3.36; `tests/llama/test_split.py` compares with what llama.cpp logs.
"""

from __future__ import annotations

from collections.abc import Mapping


def in_order(total: int, most: int) -> list[int]:
    """Sizes of batches that take tokens as they come, `most` of them at once."""
    return [min(most, total - start) for start in range(0, total, most)]


def equally(lengths: Mapping[int, int], most: int, *, neighbours: bool, tail: int) -> list[int]:
    """Sizes of batches that hold equally many tokens of each of their sequences.

    Args:
        lengths: tokens by the number of their sequence, at least one of each.
        most: tokens of a batch, at least one for each sequence.
        neighbours: whether the numbers of a batch's sequences have to follow each other: each has cells of its own.
        tail: so many last tokens of a sequence are never in two batches; 0: they may be.
    """
    left = dict(sorted(lengths.items()))
    sizes = []
    while left:
        chosen: list[int] = []
        for sequence in left:
            if not neighbours or not chosen or sequence == chosen[-1] + 1:
                chosen.append(sequence)
        each = min(most // len(chosen), *(left[sequence] for sequence in chosen))
        if tail:
            broken = [0 < left[sequence] - each < tail for sequence in chosen]
            fitting = broken.index(True) if True in broken else len(chosen)
            if not fitting:
                # The first one goes alone: to its end, or so far that its tail stays together.
                first = left[chosen[0]]
                each = first if first <= most else min(each, first - tail)
            chosen = chosen[: fitting or 1]
        sizes.append(each * len(chosen))
        for sequence in chosen:
            left[sequence] -= each
        left = {sequence: rest for sequence, rest in left.items() if rest}
    return sizes
