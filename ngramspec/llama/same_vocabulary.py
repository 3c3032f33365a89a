"""`common_tokens`: the tokens that a model and its draft model share."""

from __future__ import annotations

import llama_cpp.llama_cpp as llama

from ngramspec.data import ModelError
from ngramspec.llama.vocabulary import Vocabulary

_KINDS = {
    llama.LLAMA_TOKEN_ATTR_UNKNOWN: "unknown",
    llama.LLAMA_TOKEN_ATTR_UNUSED: "unused",
    llama.LLAMA_TOKEN_ATTR_NORMAL: "normal",
    llama.LLAMA_TOKEN_ATTR_CONTROL: "control",
    llama.LLAMA_TOKEN_ATTR_USER_DEFINED: "user-defined",
    llama.LLAMA_TOKEN_ATTR_BYTE: "byte",
}


def common_tokens(target: Vocabulary, draft: Vocabulary) -> int:
    """Return how many token ids, from 0 on, have the same text and kind in a model and its draft model.

    Later tokens may be unused ones, as padding.

    Raises:
        ModelError: The vocabularies differ in other ways.
    """
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
