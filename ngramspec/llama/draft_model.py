"""`asked_for`: a loaded model as what drafts for another one."""

from __future__ import annotations

from ngramspec.drafting.asked_model import AskedModel
from ngramspec.errors import ModelError
from ngramspec.llama.same_vocabulary import common_tokens
from ngramspec.llama.shared import SharedTarget
from ngramspec.llama.target import Target
from ngramspec.llama.vocabulary import Vocabulary


def asked_for(target: Vocabulary, model: Target | SharedTarget) -> AskedModel:
    """What asks a model for guesses at a target's tokens.

    Args:
        target: what the tokens mean there.
        model: the caller leaves it to what is returned. A shared one drafts for as many texts as it has lanes, by
            `AskedModel.beside`.

    Raises:
        ModelError: it has another vocabulary, or cannot take back what it has evaluated.
    """
    known = common_tokens(target, model)
    if not model.can_rollback:
        raise ModelError(
            f"{model.path} cannot draft: what it has evaluated cannot be taken back; take another draft model"
        )
    if isinstance(model, SharedTarget):
        return AskedModel(model.lanes[0], n_vocab=known, shared=model)
    return AskedModel(model, n_vocab=known)
