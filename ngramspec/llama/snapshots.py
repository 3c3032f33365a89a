"""`Snapshots`: by how many tokens llama.cpp's recurrent state can provably go back.

A recurrent state is one summary of all tokens so far; nothing can be cut off its end. Where the architecture supports
it, llama.cpp therefore keeps what the state was after each of the last tokens (`n_rs_seq` snapshots). A pass over n
tokens writes those of its own tokens alone: the states 0 to n - 1 tokens before its end. The state before the pass is
not among them, older snapshots are of another pass, and going back uses them up. `llama_memory_seq_rm` accepts all of
these, up to `n_rs_seq` tokens, and the logits are then wrong (llama-cpp-python 0.3.36).
"""

from __future__ import annotations


class Snapshots:
    """Which earlier states the last pass left to go back to.

    Args:
        count: snapshots that the memory keeps beside the state itself; 0: none.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._depth = 0

    def decoded(self, n: int) -> None:
        """A pass over n tokens was made, at least 1."""
        self._depth = min(self.count, n - 1)

    def takes_back(self, depth: int) -> bool:
        """Whether the state `depth` tokens ago, at least 1, is there."""
        return depth <= self._depth

    def used_up(self) -> None:
        """Trust no snapshot until the next pass: one was gone back to, or it is not known what the state holds."""
        self._depth = 0
