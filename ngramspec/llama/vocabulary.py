"""`Vocabulary`: the tokenizer of a GGUF file, and the chats, samplers and grammars over its tokens."""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Callable, Mapping
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Any

import llama_cpp.llama_cpp as llama

from ngramspec import leaves
from ngramspec.backend import FillInTokens
from ngramspec.data import ModelError, TargetError
from ngramspec.llama import bindings, crash_check
from ngramspec.llama.bindings import NativeObject
from ngramspec.llama.devices import build
from ngramspec.llama.samplers import DrySampler, SamplerChain, dry_shape
from ngramspec.models.gguf import GGUFHeader, read_header
from ngramspec.sampling.settings import Sampling
from ngramspec.tokens import Control, make_pattern

_SILENT = llama.LLAMA_TOKEN_ATTR_CONTROL | llama.LLAMA_TOKEN_ATTR_UNKNOWN  # tokens without text


class Vocabulary(NativeObject):
    """The tokenizer of a GGUF file, which converts text to tokens and back; the file need not contain weights."""

    n_ctx = 0  # context size in tokens, which the DRY sampler looks back over; 0 without a context
    _model: Any = None
    _chat_template: str | None = None

    def __init__(
        self,
        path: str | os.PathLike[str],
        model: Any = None,  # llama.cpp's handle of the model that other code loaded from the file, and frees
        header: GGUFHeader | None = None,  # header of the file, if it is known
    ) -> None:
        self.path, self._is_borrowed = Path(path), model is not None
        if model is None:
            bindings.init_backend()
            params = llama.llama_model_default_params()
            params.vocab_only = True
            model, header = open_model(self.path, params)
        header = header or read_header(self.path)
        self._model, self.metadata = model, header.metadata
        self.vocabulary_hash = header.vocabulary  # equal if every token id has the same text
        self._vocab = llama.llama_model_get_vocab(model)
        self.n_vocab: int = llama.llama_vocab_n_tokens(self._vocab)
        self._pieces: dict[int, bytes] = {}
        self._ends: dict[int, bool] = {}

    def tokenize(self, text: str, *, special: bool = False, add_bos: bool = True) -> list[int]:
        """Return the token ids of a text.

        With `special`, control tokens in it are parsed; otherwise their names are text. With `add_bos`, the start token
        (or another prefix) is added if the model requires it.
        """
        at = 0
        if special or not (match := self._found_names.search(text)):
            return self._tokenize(text, special=special, add_bos=add_bos)
        tokens = self._tokenize("", add_bos=add_bos)[:1]
        while match:
            # llama.cpp would find the name, so it gets the first character and the others separately.
            end = match.start() + 1
            tokens += self._tokenize_inner(text[at:end]) if at else self._tokenize(text[:end])
            at, match = end, self._found_names.search(text, end)
        return tokens + self._tokenize_inner(text[at:])

    def _tokenize_inner(self, text: str) -> list[int]:
        """Return the token ids of a text that follows other text, so that SentencePiece must not add a space."""
        for start in self._starts:
            before = self._tokenize(start)
            tokens = self._tokenize(start + text)
            if tokens[: len(before)] == before:  # the start has not become part of another token
                return tokens[len(before) :]
        return self._tokenize(text)

    @cached_property
    def _starts(self) -> tuple[str, ...]:
        """Texts after which a text is tokenized without a space that the vocabulary adds to the start."""
        return ("",) if b"".join(map(self.piece, self._tokenize("\n"))) == b"\n" else ("\n", "\x01")

    def _tokenize(self, text: str, *, special: bool = False, add_bos: bool = False) -> list[int]:
        self._check_open()
        raw = text.encode("utf-8", "surrogatepass")
        size = len(raw) + 8
        ids = (llama.llama_token * size)()
        n = llama.llama_tokenize(self._vocab, raw, len(raw), ids, size, add_bos, special)
        if n < 0:
            ids = (llama.llama_token * -n)()
            n = llama.llama_tokenize(self._vocab, raw, len(raw), ids, -n, add_bos, special)
        if n < 0:
            raise TargetError("the text could not be tokenized")
        tokens: list[int] = ids[:n]
        if tokens and min(tokens) < 0:
            raise TargetError("the model's vocabulary has no tokens for this text; use another file of the model")
        return tokens

    def piece(self, token: int) -> bytes:
        """Return the bytes of a token's text; control tokens have none."""
        piece = self._pieces.get(token)
        if piece is None:
            piece = self._pieces[token] = self._bytes(token, special=False)
        return piece

    def display_piece(self, token: int) -> bytes:
        """Return the bytes of a token's text, or the name of a control token for parsers that need it."""
        return self.piece(token) or self._bytes(token, special=True)

    def _bytes(self, token: int, *, special: bool) -> bytes:
        self._check_open()
        if not 0 <= token < self.n_vocab:
            raise ValueError(f"token {token} is not in the vocabulary of {self.n_vocab}")
        size = 64
        while True:
            buffer = ctypes.create_string_buffer(size)
            n = llama.llama_token_to_piece(self._vocab, token, buffer, size, 0, special)
            if n >= 0:
                return buffer.raw[:n]
            size = -n

    def is_eog(self, token: int) -> bool:
        """Return True if the token ends a generation (end of text, of turn, of message)."""
        ends = self._ends.get(token)
        if ends is None:
            self._check_open()
            ends = self._ends[token] = bool(llama.llama_vocab_is_eog(self._vocab, token))
        return ends

    @property
    def chat_template(self) -> str | None:
        """Chat template (Jinja) of the model, or the one set by `use_chat_template`; `None` if the model has none."""
        if self._chat_template is not None:
            return self._chat_template
        raw = llama.llama_model_chat_template(self._model, None)
        return raw.decode("utf-8", "replace") if raw else None

    def use_chat_template(self, template: str) -> None:
        """Format conversations with another template in Jinja, or with one of llama.cpp's templates by its name."""
        self._chat_template = template
        for part in ("chats", "control_tokens", "_found_names", "_template_text"):
            self.__dict__.pop(part, None)
        self.chats.check()

    @property
    def ends(self) -> tuple[str, str]:
        """Texts of the start and end tokens; "" for one that the vocabulary lacks."""
        self._check_open()
        bos, eos = llama.llama_vocab_bos(self._vocab), llama.llama_vocab_eos(self._vocab)
        return self._special_text(bos), self._special_text(eos)

    @cached_property
    def longest_token(self) -> int:
        """Maximum bytes in a token; a text with more characters than this times the context size does not fit."""
        return max(len(self.piece(token)) for token in range(self.n_vocab))

    @cached_property
    def controls(self) -> Mapping[str, int]:
        """Ids of the control tokens without text, by their names."""
        return {name: control.token for name, control in self.control_tokens.items() if not self.piece(control.token)}

    @cached_property
    def control_tokens(self) -> dict[str, Control]:
        """All control tokens by their names, those that are text too."""
        self._check_open()
        controls = {}
        for token in range(self.n_vocab):
            attributes = llama.llama_vocab_get_attr(self._vocab, token)
            is_silent = attributes & _SILENT
            if is_silent or (attributes & llama.LLAMA_TOKEN_ATTR_USER_DEFINED and self._is_mark(token)):
                strips = (attributes & llama.LLAMA_TOKEN_ATTR_LSTRIP, attributes & llama.LLAMA_TOKEN_ATTR_RSTRIP)
                controls[self._special_text(token)] = Control(token, *map(bool, strips))
        controls.pop("", None)
        return controls

    @cached_property
    def _found_names(self) -> re.Pattern[str]:
        """Names of the control tokens that llama.cpp finds in every text, because their type is "user-defined"."""
        attribute = partial(llama.llama_vocab_get_attr, self._vocab)
        tokens = {name: control.token for name, control in self.control_tokens.items() if len(name) > 1}
        return make_pattern(name for name, token in tokens.items() if not attribute(token) & _SILENT)

    def _is_mark(self, token: int) -> bool:
        """Return True if a user-defined token is a control token: by its role, by its name, or by the template."""
        name = self._special_text(token)
        mark = r"(?s)[<\[][|\uff5c].*..|.*..[|\uff5c][>\]]"  # <|start|>, <|tool_call>, [|user|]
        tag = r"(?s)[^\w\s].*[^\W\d].*[^\w\s]"  # [INST], <think>; not a tab, a word or a number
        return (
            self.is_eog(token)
            or token == llama.llama_vocab_bos(self._vocab)
            or token in self.fill_in_tokens
            or re.fullmatch(mark, name) is not None
            or (re.fullmatch(tag, name) is not None and name in self._template_text)
        )

    @cached_property
    def _template_text(self) -> str:
        return self.chats.template_text if self._chat_template is not None else self.chat_template or ""

    @cached_property
    def chats(self) -> leaves.ChatFormat:
        return leaves.ChatFormat(self)

    def _special_text(self, token: int) -> str:
        text = llama.llama_vocab_get_text(self._vocab, token) if token >= 0 else None
        return text.decode("utf-8", "replace") if text else ""

    @property
    def end_of_turn(self) -> int | None:
        """Token that ends an answer; `None` if the vocabulary has none."""
        token = llama.llama_vocab_eot(self._vocab)
        token = token if token >= 0 else llama.llama_vocab_eos(self._vocab)
        return int(token) if token >= 0 else None

    @property
    def fill_in_tokens(self) -> FillInTokens:
        """Tokens that mark the parts of a fill-in-the-middle prompt, as far as the vocabulary has them."""
        self._check_open()
        marks = (llama.llama_vocab_fim_pre, llama.llama_vocab_fim_suf, llama.llama_vocab_fim_mid)
        ids = [int(f(self._vocab)) for f in (*marks, llama.llama_vocab_fim_rep, llama.llama_vocab_fim_sep)]
        return FillInTokens(*(token if token >= 0 else None for token in ids))

    def grammar(self, text: str) -> Any:
        """Return a grammar in GBNF or `Lark` in its initial state."""
        self._check_open()
        return self.grammars.begin(text)

    @cached_property
    def grammars(self) -> leaves.Grammars:
        return leaves.Grammars(self)

    def sampler(self, sampling: Sampling) -> SamplerChain:
        """Return the samplers that a `Sampling` specifies, for one sequence."""
        self._check_open()
        if "infill" in sampling.samplers and self._no_infill:
            raise ValueError(f"this model does not support the sampler infill: {self._no_infill}")
        return SamplerChain(
            sampling,
            self.n_vocab,
            vocab=self._vocab,
            n_ctx=self.n_ctx,
            dry_samplers=self._dry_samplers,
            grammar=self.grammar(sampling.grammar) if sampling.grammar is not None else None,
            suppressed_tokens=self.suppress_tokens,
        )

    def prepare(self, sampling: Sampling) -> None:
        """Prepare the slow parts of a sampler, so that `sampler` is fast; any thread may call this."""
        self._check_open()
        shape = dry_shape(sampling, self.n_ctx)
        if "dry" in sampling.samplers and shape[3]:
            self._dry_samplers(*shape)

    @cached_property
    def _dry_samplers(self) -> Callable[..., DrySampler]:
        return lru_cache(32)(partial(DrySampler, self._vocab))

    @cached_property
    def _no_infill(self) -> str:
        """Reason why llama.cpp's infill sampler would end the process with this vocabulary; "" if it would not."""
        if self.end_of_turn is None:
            return "its vocabulary has no token that ends a text"
        text, vocab, size = llama.llama_vocab_get_text, self._vocab, 512  # of the sampler's buffer for a token's text
        if any(len(text(vocab, token)) > size for token in range(self.n_vocab)):
            return f"its vocabulary has a token of more than {size} bytes"
        return ""

    @cached_property
    def suppress_tokens(self) -> tuple[int, ...]:
        self._check_open()
        return bindings.find_suppress_tokens(self._vocab)

    def _check_open(self) -> None:
        if not self._model:
            raise ValueError("the vocabulary is closed")

    def close(self) -> None:
        """Free llama.cpp's objects; this object and the logits that it returned cannot be used afterwards."""
        if self._model and not self._is_borrowed:
            llama.llama_model_free(self._model)
        self._model = None


def open_model(path: Path, params: Any) -> tuple[Any, GGUFHeader]:
    """Load a model file with llama.cpp's parameters, and return its handle and the header of the file."""
    header = crash_check.check(path, build())
    bindings.log_tail.clear()
    model = llama.llama_model_load_from_file(os.fsencode(path), params)
    if not model:
        # Python prints and drops an exception in a callback, such as one of Ctrl-C. llama.cpp may then take the
        # undefined return value for a request to stop.
        if any("cancelled model load" in text for _, text in bindings.log_tail):
            raise KeyboardInterrupt
        complaint = bindings.last_complaint()
        hint = "; a newer llama-cpp-python may know it" if "unknown model architecture" in complaint else ""
        raise ModelError(f"{path}: llama.cpp cannot load this model ({complaint}){hint}")
    assert header is not None
    if llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model)) == 0:
        llama.llama_model_free(model)
        raise ModelError(f"{path}: the file has no vocabulary; use one that contains a tokenizer")
    return model, header


_KINDS = {
    llama.LLAMA_TOKEN_ATTR_UNKNOWN: "unknown",
    llama.LLAMA_TOKEN_ATTR_UNUSED: "unused",
    llama.LLAMA_TOKEN_ATTR_NORMAL: "normal",
    llama.LLAMA_TOKEN_ATTR_CONTROL: "control",
    llama.LLAMA_TOKEN_ATTR_USER_DEFINED: "user-defined",
    llama.LLAMA_TOKEN_ATTR_BYTE: "byte",
}


def common_tokens(target: Vocabulary, draft: Vocabulary) -> int:
    """Return how many token ids have the same text and kind in both models; later ones may be unused, as padding."""
    n_common = min(target.n_vocab, draft.n_vocab)
    same = next((token for token in range(n_common) if _token(target, token) != _token(draft, token)), n_common)
    if all(
        _token(vocabulary, token)[1] == "unused"
        for vocabulary in (target, draft)
        for token in range(same, vocabulary.n_vocab)
    ):
        return same
    ours, theirs = (_describe_token(vocabulary, same) for vocabulary in (target, draft))
    raise ModelError(
        f"{draft.path} cannot draft for {target.path}: their vocabularies differ at token {same} of {target.n_vocab}"
        f" and {draft.n_vocab}: {ours} and, in the draft model, {theirs}; use a model of the same family"
    )


def _describe_token(vocabulary: Vocabulary, token: int) -> str:
    if token >= vocabulary.n_vocab:
        return "missing"
    text, kind = _token(vocabulary, token)
    return f"{text.decode('utf-8', 'replace')!r} ({kind})"


def _token(vocabulary: Vocabulary, token: int) -> tuple[bytes, str]:
    attributes = llama.llama_vocab_get_attr(vocabulary._vocab, token)
    kind = next((name for bit, name in _KINDS.items() if attributes & bit), "of no kind")
    return llama.llama_vocab_get_text(vocabulary._vocab, token), kind
