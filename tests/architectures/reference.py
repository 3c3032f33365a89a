"""A reference that decodes token by token from an empty memory of llama.cpp, without rollbacks.

It shares no code with `ngramspec.llama.target`, so it cannot contain the same errors about memories.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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
    """Model that evaluates every text from its beginning."""

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
        self._context = llama.llama_init_from_model(self._model, params)
        if not self._context:
            raise RuntimeError("llama.cpp cannot make a context")
        self._batch: Any = llama.llama_batch_init(n_batch, 0, 1)
        self._length = 0  # of the text in the context

    def text(self, prompt: Sequence[int], count: int, choose: Chooser = likeliest) -> tuple[list[int], Rows]:
        """Return (next `count` tokens, logits of shape (count, n_vocab) that decided on each)."""
        self._empty()
        for chunk in self._chunks(prompt):
            row = self._decode(chunk, last=True)[0]
        rows, text = [row], [choose(row, [])]
        while len(text) < count:
            rows.append(self._decode(text[-1:])[0])
            text.append(choose(rows[-1], text))
        return text, np.array(rows)

    def rows(self, text: Sequence[int]) -> Rows:
        """Return the logits after each token of a text that is evaluated as a prompt."""
        self._empty()
        return np.concatenate([self._decode(chunk) for chunk in self._chunks(text)])

    def _chunks(self, text: Sequence[int]) -> Iterator[Sequence[int]]:
        return (text[i : i + self.n_batch] for i in range(0, len(text), self.n_batch))

    def _empty(self) -> None:
        """Clear the memory with its data, which is faster than a new context."""
        llama.llama_memory_clear(llama.llama_get_memory(self._context), True)
        self._length = 0

    def _decode(self, tokens: Sequence[int], *, last: bool = False) -> Rows:
        """Append tokens to the context and return their logits, or only the last ones."""
        batch = self._batch
        batch.n_tokens = len(tokens)
        for i, token in enumerate(tokens):
            batch.token[i], batch.pos[i] = token, self._length + i
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
            batch.logits[i] = not last or i == len(tokens) - 1
        status = llama.llama_decode(self._context, batch)
        if status:
            raise RuntimeError(f"llama_decode returned {status}")
        self._length += len(tokens)
        shape = (1 if last else len(tokens), self.n_vocab)
        return np.ctypeslib.as_array(llama.llama_get_logits(self._context), shape).copy()

    def close(self) -> None:
        """Free the context and the model."""
        llama.llama_batch_free(self._batch)
        llama.llama_free(self._context)
        llama.llama_model_free(self._model)
