"""The rules that llama.cpp reads from a GBNF grammar, as a reference for ngramspec."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

import llama_cpp.llama_cpp as llama
from support.vocabulary_files import END

from ngramspec.llama.vocabulary import Vocabulary

FIRST_BYTE = 3  # token of the byte 0 in the word vocabulary


@contextmanager
def open_grammar(vocabulary: Vocabulary, text: str) -> Iterator[ctypes.c_void_p | None]:
    """Read a grammar with llama.cpp; return `None` if llama.cpp considers it as left-recursive."""
    sampler = llama.llama_sampler_init_grammar(vocabulary._vocab, text.encode(), b"root")
    yield sampler
    if sampler:
        llama.llama_sampler_free(sampler)


def read_with_llama(vocabulary: Vocabulary, text: str, raw: bytes) -> tuple[int, bool] | None:
    """Return the same of llama.cpp's reading; None if it does not read the grammar."""

    def allows(token: int) -> bool:
        data = (llama.llama_token_data * 1)(llama.llama_token_data(id=token, logit=0.0, p=0.0))
        array = llama.llama_token_data_array(data=data, size=1, selected=-1, sorted=False)
        llama.llama_sampler_apply(sampler, ctypes.byref(array))
        return bool(data[0].logit == 0)

    with open_grammar(vocabulary, text) as sampler:
        if not sampler:
            return None
        for count, byte in enumerate(raw):
            if not allows(FIRST_BYTE + byte):
                return count, False
            llama.llama_sampler_accept(sampler, FIRST_BYTE + byte)
        return len(raw), allows(END)
