"""Tests of `compile_grammar`: grammars that the worker's child process has compiled."""

from __future__ import annotations

import pytest

from ngramspec.errors import GrammarError
from ngramspec.grammars.lark import Lark
from ngramspec.grammars.worker import compile_grammar, worker


def test_compiled_replaces_token_names_and_rejects_invalid_grammars() -> None:
    grammar = worker.call(compile_grammar, 'root ::= <a> "b"', {"<a>": 40_000}, 50_000)
    assert isinstance(grammar, Lark)
    assert "<[40000]>" in grammar
    assert worker.call(compile_grammar, grammar, {}, 50_000) == grammar
    for text, names in (("root ::= <a>", {}), ("root ::= (", {}), ("root ::= <[40000]>", {})):
        with pytest.raises(GrammarError):
            worker.call(compile_grammar, text, names, 5000)
