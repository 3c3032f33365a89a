"""Whether two models mean the same by their tokens, as a draft model and its target must."""

from __future__ import annotations

import llama_cpp.llama_cpp as llama

from ngramspec.errors import ModelError
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
    """How many token ids, from 0 on, stand for the same in both: the same text, of the same kind.

    Behind them there may be padding, tokens that are unused: models of one family are padded to different sizes.

    Raises:
        ModelError: the vocabularies differ otherwise. It names the first id, and what it is in each.
    """
    both = min(target.n_vocab, draft.n_vocab)
    same = next((token for token in range(both) if _token(target, token) != _token(draft, token)), both)
    if all(_token(one, token)[1] == "unused" for one in (target, draft) for token in range(same, one.n_vocab)):
        return same
    ours, theirs = (_told(one, same) for one in (target, draft))
    raise ModelError(
        f"{draft.path} cannot draft for {target.path}: their vocabularies differ, at token {same} of {target.n_vocab}"
        f" and {draft.n_vocab}: {ours} here, {theirs} in the draft model; take a model of the same family"
    )


def _told(vocabulary: Vocabulary, token: int) -> str:
    if token >= vocabulary.n_vocab:
        return "missing"
    text, kind = _token(vocabulary, token)
    return f"{text.decode('utf-8', 'replace')!r} ({kind})"


def _token(vocabulary: Vocabulary, token: int) -> tuple[bytes, str]:
    """A token's text, and its kind."""
    attributes = llama.llama_vocab_get_attr(vocabulary._vocab, token)
    kind = next((name for bit, name in _KINDS.items() if attributes & bit), "of no kind")
    return llama.llama_vocab_get_text(vocabulary._vocab, token), kind
