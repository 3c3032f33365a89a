"""A reference that decodes token by token in new contexts of llama.cpp, without rollbacks.

It shares no code with `ngramspec.llama.target`, so it cannot contain the same errors about memories.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import llama_cpp.llama_cpp as llama
import numpy as np
from numpy.typing import NDArray

Rows = NDArray[np.float32]
Chooser = Callable[[NDArray[np.float32], list[int]], int]
"""(logits, text so far) -> next token."""


def likeliest(row: NDArray[np.float32], _text: list[int]) -> int:
    """Return the most likely token, as in greedy decoding."""
    return int(row.argmax())


class Reference:
    """Model that opens a new context for every call."""

    def __init__(
        self,
        path: Path,
        *,
        n_ctx: int,
        n_batch: int,  # number of tokens in a chunk of the prompt
        flash: int,  # 1 for flash attention, 0 for none, -1 to let llama.cpp choose
        threads: int,
        cache_type: int = 1,  # ggml's number of the KV cache's element type; 1 is f16, 0 is f32
        gpu_layers: int = 0,
    ) -> None:
        llama.llama_backend_init()
        params = llama.llama_model_default_params()
        params.n_gpu_layers = gpu_layers
        params.use_extra_bufts = False  # The AMX kernels of some builds are broken.
        self._model = llama.llama_model_load_from_file(str(path).encode(), params)
        if not self._model:
            raise RuntimeError(f"{path}: llama.cpp cannot load this model")
        self.n_vocab: int = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(self._model))
        self.n_batch = n_batch
        params = llama.llama_context_default_params()
        params.n_ctx = n_ctx
        params.n_batch = params.n_ubatch = n_batch
        params.n_threads = params.n_threads_batch = threads
        params.flash_attn_type = flash
        params.type_k = params.type_v = cache_type
        self._params = params

    def text(self, prompt: Sequence[int], count: int, choose: Chooser = likeliest) -> tuple[list[int], Rows]:
        """Return (next `count` tokens, logits of shape (count, n_vocab) that decided on each)."""
        with self._context() as decode:
            rows = [self._read(decode, prompt)]
            text = [choose(rows[0], [])]
            while len(text) < count:
                rows.append(decode(text[-1:])[0])
                text.append(choose(rows[-1], text))
        return text, np.array(rows)

    def rows(self, text: Sequence[int]) -> Rows:
        """Return the logits after each token of a text that is evaluated as a prompt."""
        with self._context() as decode:
            return np.concatenate([decode(text[i : i + self.n_batch]) for i in range(0, len(text), self.n_batch)])

    def _read(self, decode: Callable[..., Rows], prompt: Sequence[int]) -> NDArray[np.float32]:
        """Return the logits after a prompt that is evaluated in chunks."""
        rows = [decode(prompt[i : i + self.n_batch], last=True) for i in range(0, len(prompt), self.n_batch)]
        row: NDArray[np.float32] = rows[-1][-1]
        return row

    @contextmanager
    def _context(self) -> Iterator[Callable[..., Rows]]:
        """Yield a function that appends tokens to a new context and returns their logits, or only the last ones."""
        context = llama.llama_init_from_model(self._model, self._params)
        if not context:
            raise RuntimeError("llama.cpp cannot make a context")
        batch: Any = llama.llama_batch_init(self.n_batch, 0, 1)
        length = 0

        def decode(tokens: Sequence[int], *, last: bool = False) -> Rows:
            nonlocal length
            batch.n_tokens = len(tokens)
            for i, token in enumerate(tokens):
                batch.token[i], batch.pos[i] = token, length + i
                batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
                batch.logits[i] = not last or i == len(tokens) - 1
            status = llama.llama_decode(context, batch)
            if status:
                raise RuntimeError(f"llama_decode returned {status}")
            length += len(tokens)
            wanted = (len(tokens) - 1,) if last else range(len(tokens))
            shape = (self.n_vocab,)
            rows = [np.ctypeslib.as_array(llama.llama_get_logits_ith(context, i), shape).copy() for i in wanted]
            return np.array(rows)

        try:
            yield decode
        finally:
            llama.llama_batch_free(batch)
            llama.llama_free(context)

    def close(self) -> None:
        """Free the model."""
        llama.llama_model_free(self._model)
