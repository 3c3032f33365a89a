"""Child process that prepares the grammars of requests, so that no grammar can block or end this process (`worker`).

llguidance limits what it compiles, but some limits allow minutes, and some grammars end the process. This process can
repeat what the child finished in time.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from llguidance import LLTokenizer, TokenizerWrapper

from ngramspec.data import GrammarError
from ngramspec.grammars.gbnf import gbnf_to_lark
from ngramspec.grammars.lark import Lark, compile_lark
from ngramspec.worker import Worker

worker = Worker("the grammar", "prepare", GrammarError, cache=8 * 2**20)


def compile_grammar(text: str, names: Mapping[str, int], n_vocab: int) -> Lark:
    """Convert a grammar, in GBNF or `Lark`, to one that llguidance can compile for a vocabulary of this size.

    `names` has the tokens that GBNF may name. An invalid or too large grammar raises a GrammarError.
    """
    grammar = text if isinstance(text, Lark) else gbnf_to_lark(text, names.get)
    compile_lark(grammar, _tokenizer(n_vocab))
    return grammar


@lru_cache(1)
def _tokenizer(n_vocab: int) -> LLTokenizer:
    """Return a vocabulary of all bytes and further tokens without a text, which replaces the real one."""

    class Bytes:
        bos_token_id, eos_token_id = None, 255
        tokens = tuple(bytes([i]) if i < 255 else b"\xff[%d]" % i for i in range(max(n_vocab, 256)))
        special_token_ids = ()

        def __call__(self, text: bytes) -> list[int]:
            return [*text]

    return LLTokenizer(TokenizerWrapper(Bytes()))
