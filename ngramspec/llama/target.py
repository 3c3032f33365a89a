"""`Target`: a loaded GGUF model with one sequence in its KV cache.

The contract in three calls:

    logits = target.prefill(prompt)        # (n_vocab,) after the last token; reuses the longest common prefix
    logits = target.evaluate(tokens)       # (len(tokens), n_vocab): ONE llama_decode, appended to the cache
    target.rollback(length)                # the cache stands for exactly its first `length` tokens again

The low-level API is used: logits are requested for the positions that are read and for no others, so nothing grows
with n_ctx x n_vocab. It knows nothing about drafts or acceptance.
"""

from __future__ import annotations

from collections.abc import Sequence

import llama_cpp.llama_cpp as llama

from ngramspec.backend import Logits, Node, Path, Progress
from ngramspec.llama.asking import Asking
from ngramspec.llama.context import Context
from ngramspec.llama.sequences import Sequences


class Target(Context):
    """A GGUF model, its context and the tokens in its KV cache.

    Args:
        path: a GGUF file (the first part of a split one).
        n_ctx: context size in tokens; None takes the model's own, capped so that the KV cache fits in half of
            the machine's free memory (`notes` then says so).
        n_gpu_layers: layers to offload; negative: all, to whatever GPU the build supports.
        threads: CPU threads; None takes the physical cores.
        threads_batch: the same for passes over more than one token, prompts and drafts; None: as many.
        micro_batch: tokens of a prompt per pass, LEAST_MICRO to MOST_MICRO; None: 512, without flash attention 128.
        flash_attn: "auto" leaves the choice to llama.cpp.
        cache_type_k, cache_type_v: element type of the KV cache.
        mmap: map the file instead of reading it.
        exact: "on" chooses the settings under which most batch sizes give bit-identical logits: no flash attention
            where the model runs on the CPU (see `ngramspec.cost.kernels`), and a micro-batch small enough for its
            attention scores. "auto" measures what that costs, if it is not known, and takes the fastest or those (see
            `ngramspec.exactness.auto`).
        extra_buffers: None leaves AMX out if this build's kernels for it are broken (`notes` then says so, and
            `amx_broken` is true). True takes all of ggml's extra buffer types for weights, unchecked and before a
            GPU's host memory; False takes none. Both are for the check itself.
        n_seq: most sequences in the cache, 1 to MAX_EVALUATE; they share its cells. `sequences` and `ask` need several.
            None: as many as `ask` needs where the model can be asked, else 1.
        draft_max: the longest draft that will be sent, if known: of a recurrent state as many snapshots are kept
            (None: SNAPSHOTS), or fewer if the machine is short of memory (`notes` then says so).
        head: also load the model's own head, which drafts for it, where the file holds one and this build runs it
            (`notes` says why not, else).

    Attributes:
        exact: as above.
        footing: what "auto" has decided on.
        setting: "fast" or "exact": what the context was opened for.
        head: the model's own head, a model that drafts (see `ngramspec.llama.head`); None: not asked for, or not there.
        can_rollback: whether refused drafts can be taken back.
        replays: whether that is done by evaluating tokens again from a checkpoint on: the model has a recurrent
            state, and llama.cpp keeps no snapshots for this architecture.
        leaves: most branches of questions; 0 where the cache cannot hold any, or would give away what they share.
        max_batch: most tokens of a pass of which all but the first can be taken back; `evaluate` takes more.

    Raises:
        ValueError: an argument is out of its range.
        ModelError: the file cannot be loaded, cannot generate text, or the context does not fit.
    """

    _asking: Asking | None = None

    @property
    def tokens(self) -> list[int]:
        """What the cache stands for."""
        return self._lanes[0].tokens

    def prefill(self, tokens: Sequence[int], *, aligned: bool = False, progress: Progress | None = None) -> Logits:
        """Make the cache hold exactly `tokens` and return the logits after the last one, shape (n_vocab,).

        Args:
            tokens: 1 to n_ctx token ids.
            aligned: reuse only what an aligned prefill computed, in whole chunks, so that the logits depend on
                `tokens` alone and not on how the cache came to hold them (exact mode).
            progress: called with (tokens done, tokens in all) after each chunk.

        Raises:
            ValueError: no tokens, or more than n_ctx.
            TargetError: llama.cpp could not evaluate them.
        """
        self._check_open()
        return self._lanes[0].prefill(tokens, aligned=aligned, progress=progress)

    def evaluate(self, tokens: Sequence[int]) -> Logits:
        """Append `tokens` (1 to MAX_EVALUATE) to the cache in one `llama_decode`.

        Returns:
            Logits after each of them, shape (len(tokens), n_vocab): a view of llama.cpp's buffer, valid until
            the next call that evaluates anything.

        Raises:
            ValueError: none, too many, or more than the context has room for.
            TargetError: llama.cpp could not evaluate them; the cache is as before.
        """
        self._check_open()
        return self._lanes[0].evaluate(tokens)

    def ask(self, tokens: Sequence[int], questions: Sequence[Path]) -> Logits:
        """See `ngramspec.backend.Asked`; errors as of `evaluate`, and ValueError for more than `leaves` branches."""
        self._check_open()
        if self._asking is None:
            if not self.leaves:
                raise ValueError("questions need a target with n_seq above 1 and a memory that keeps what they share")
            self._asking = Asking(llama, self._ctx, self._passes, self._lanes[0], self.leaves)
        return self._asking.evaluate(tokens, questions)

    def rollback(self, length: int) -> None:
        """Let the cache stand for the first `length` of its tokens.

        If the state cannot provably go back to exactly there, it goes further, to a checkpoint or to the beginning.
        The next call that evaluates anything then evaluates the tokens in between again: `owed` says how many.

        Raises:
            ValueError: `length` is negative or more than the cache holds.
        """
        self._check_open()
        self._lanes[0].rollback(length)

    def clear(self) -> None:
        """Forget everything in the cache."""
        self._check_open()
        self._lanes[0].clear()

    @property
    def owed(self) -> int:
        """How many tokens of the cache the next call must evaluate again before its own."""
        return self._lanes[0].owed

    def checkpoint(self) -> None:
        """Make it cheap to roll back to here until the next checkpoint, however much is evaluated meanwhile.

        This copies a recurrent state, a few to some hundred MB; without one the cache can be cut anywhere as it is.
        """
        self._check_open()
        self._lanes[0].checkpoint()

    def close(self) -> None:
        """Free the context and the model; the target, and logits it returned, cannot be used afterwards."""
        if self._asking is not None:
            self._asking.close()
            self._asking = None
        super().close()

    # ------------------------------------------------------------------ several continuations

    @property
    def can_branch(self) -> bool:
        """Whether several continuations can share a beginning in the cache; recurrent states cannot be shared."""
        return self.can_pool and not self._recurrent

    def sequences(self, root: Node) -> Sequences:
        """A tree of continuations of what the cache holds; nothing else may be evaluated until it is closed.

        Args:
            root: stands for what the cache holds.

        Raises:
            ValueError: the target was loaded for one sequence, its KV cache cannot branch, or `root` is not as long.
        """
        self._check_open()
        if self.n_seq < 2 or not self.can_branch:
            raise ValueError(
                "a tree needs a target with n_seq above 1 and a memory that is not recurrent, nor read in blocks"
            )
        if self._asking is not None:
            self._asking.leave()
        self._lanes[0].settle()
        if root.length != len(self.tokens) or not self.tokens:
            raise ValueError(f"a tree after {root.length} tokens cannot grow where the cache holds {len(self.tokens)}")
        return Sequences(
            llama,
            self._ctx,
            llama.llama_get_memory(self._ctx),
            self._passes.logits,
            root,
            count=self.n_seq,
            max_batch=self.max_batch,
            windowed=self.window > 0,
        )
