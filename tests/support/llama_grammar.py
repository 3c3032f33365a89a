"""The rules that llama.cpp reads from a GBNF grammar, as a reference for ngramspec."""

from __future__ import annotations

import ctypes

import llama_cpp.llama_cpp as llama
from support.model_files import END

from ngramspec.llama.vocabulary import Vocabulary

FIRST_BYTE = 3  # token of the byte 0 in the word vocabulary


def read_with_llama(vocabulary: Vocabulary, text: str, raw: bytes) -> tuple[int, bool] | None:
    """Let llama.cpp read bytes by a grammar.

    Returns:
        The number of bytes that the grammar allows, and True if the text may end after them all. `None` means that
        llama.cpp considers the grammar as left-recursive.
    """
    sampler = llama.llama_sampler_init_grammar(vocabulary._vocab, text.encode(), b"root")
    if not sampler:
        return None

    def allows(token: int) -> bool:
        data = (llama.llama_token_data * 1)(llama.llama_token_data(id=token, logit=0.0, p=0.0))
        array = llama.llama_token_data_array(data=data, size=1, selected=-1, sorted=False)
        llama.llama_sampler_apply(sampler, ctypes.byref(array))
        return bool(data[0].logit == 0)

    count = 0
    while count < len(raw) and allows(FIRST_BYTE + raw[count]):
        llama.llama_sampler_accept(sampler, FIRST_BYTE + raw[count])
        count += 1
    may_end = count == len(raw) and allows(END)
    llama.llama_sampler_free(sampler)
    return count, may_end
