"""`Grammar`: which tokens may come next, by llama.cpp's own GBNF engine, and its place in one text."""

from __future__ import annotations

import ctypes
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self

import llama_cpp.llama_cpp as llama
import numpy as np
from numpy.typing import NDArray

from ngramspec.errors import GrammarError
from ngramspec.llama import bindings
from ngramspec.llama.grammar_check import check_grammar

CANDIDATE = np.dtype([("id", "<i4"), ("logit", "<f4"), ("p", "<f4")])  # llama.cpp's `llama_token_data`


class Grammar:
    """A grammar at one place of its text. Tokens it does not allow must not be accepted.

    Raises:
        GrammarError: the text is not GBNF with a rule named root; the message names the line.
        ValueError: by all methods, once the vocabulary is closed.
    """

    def __init__(self, vocabulary: Any, text: str) -> None:
        self.vocabulary = vocabulary
        bindings.log_tail.clear()
        with _captured_stderr() as captured:
            self._sampler = llama.llama_sampler_init_grammar(vocabulary._vocab, _encode(text), b"root")
        if not self._sampler:
            raise GrammarError(
                _parse_error(captured[0], text) or f"the grammar cannot be used: {bindings.last_complaint()}"
            )

    def copy(self) -> Self:
        """An independent grammar at the same place."""
        self._check_open()
        twin = object.__new__(type(self))
        twin.vocabulary = self.vocabulary
        twin._sampler = llama.llama_sampler_clone(self._sampler)
        return twin

    def forbid(self, candidates: NDArray[np.void]) -> None:
        """Set the logit of every forbidden token to -inf; `candidates` is a contiguous array of `CANDIDATE`."""
        self._check_open()
        data = ctypes.cast(candidates.ctypes.data, ctypes.POINTER(llama.llama_token_data))
        array = llama.llama_token_data_array(data=data, size=candidates.size, selected=-1, sorted=False)
        llama.llama_sampler_apply(self._sampler, ctypes.byref(array))

    def allowed(self, ids: NDArray[np.integer]) -> NDArray[np.bool_]:
        """Which of these tokens, shape (n,), may come next."""
        candidates = np.zeros(ids.size, CANDIDATE)
        candidates["id"] = ids
        self.forbid(candidates)
        result: NDArray[np.bool_] = candidates["logit"] == 0
        return result

    def allows(self, token: int) -> bool:
        """Whether this token may come next."""
        # Asked about a token outside the vocabulary, llama.cpp would end the process.
        return 0 <= token < self.vocabulary.n_vocab and bool(self.allowed(np.array([token]))[0])

    def accept(self, token: int) -> None:
        """Move on by a token that is allowed."""
        self._check_open()
        llama.llama_sampler_accept(self._sampler, token)

    def _check_open(self) -> None:
        # llama.cpp's grammar points into the vocabulary, which goes with the model.
        if self.vocabulary.closed:
            raise ValueError(f"the {type(self.vocabulary).__name__.lower()} is closed")

    def __del__(self) -> None:
        if getattr(self, "_sampler", None):
            llama.llama_sampler_free(self._sampler)
            self._sampler = None


def _encode(text: str) -> bytes:
    """A grammar for llama.cpp, which reads up to the first NUL, and takes an empty one for none."""
    try:
        raw = text.encode()
    except UnicodeEncodeError as error:
        raise GrammarError(f"the grammar does not parse: character {error.start} of it is not valid text") from error
    if not raw or b"\0" in raw:
        raise GrammarError(f"the grammar {'holds a NUL character' if raw else 'is empty: it has no rule named root'}")
    check_grammar(text)
    return raw


@contextmanager
def _captured_stderr() -> Iterator[list[str]]:
    """What C code writes to stderr meanwhile: llama.cpp prints there what is wrong with a grammar."""
    captured = [""]
    sys.stderr.flush()
    try:
        kept = os.dup(2)
    except OSError:  # a program without stderr
        yield captured
        return
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 2)
        try:
            yield captured
        finally:
            os.dup2(kept, 2)
            os.close(kept)
            file.seek(0)
            captured[0] = file.read().decode("utf-8", "replace")


def _parse_error(printed: str, text: str) -> str | None:
    """llama.cpp's reason, which ends in all that follows the mistake: the line it is in says that better."""
    _, found, reason = printed.partition("error parsing grammar: ")
    if not found:
        return None
    reason = reason.split("\n\n" + text)[0]
    what, at, rest = reason.partition(" at ")
    if at and text.endswith(rest):
        line = text[: len(text) - len(rest)].count("\n") + 1
        near = rest.split("\n")[0].strip()
        what += f" in line {line}" + (f", at {near[:40]!r}" if near else "")
    return f"the grammar does not parse: {' '.join(what.split())}"
