"""`LlamaDraftModel`: the default drafter as the `draft_model` of llama-cpp-python's own `Llama`."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ngramspec.drafting import DEFAULT, make_drafter
from ngramspec.drafting.price import TokenPrice
from ngramspec.llama.borrowed import DraftModel


class LlamaDraftModel(DraftModel):  # type: ignore[misc]
    """Drafts for `llama_cpp.Llama(path, draft_model=LlamaDraftModel())`, where `ngramspec.Llama` cannot take its place.

    It is worth less than `ngramspec.Llama`, by what that class's loop does not do: nothing measures what a batch costs
    here, so drafts that do not pay are sent all the same and text may come slower; a refused draft that the KV cache
    cannot let go (recurrent and hybrid models) is not noticed, and changes the text; and that class computes the logits
    of all tokens. Texts above n_batch tokens need its `logits_all=True` too: n_ctx x n_vocab x 4 bytes.

    Args:
        num_pred_tokens: most tokens in a draft.
        least: a draft ends when the estimated probability that all of it is accepted falls below this.
    """

    def __init__(self, num_pred_tokens: int = 10, least: float = 0.3) -> None:
        self._most = num_pred_tokens
        self._price = TokenPrice(1.0, [least] * (num_pred_tokens + 1))
        self._drafter = make_drafter(DEFAULT)
        self._text: list[int] = []

    def __call__(self, input_ids: NDArray[np.intc], /, **kwargs: Any) -> NDArray[np.intc]:
        """The tokens that may follow `input_ids`, shape (n,); none where nothing is likely enough."""
        before, self._text = self._text, input_ids.tolist()
        known = len(before)
        if 0 < known < len(self._text) and self._text[:known] == before:
            self._drafter.accept(self._text[known:])
        else:
            self._drafter.begin(self._text)
        return np.array(self._drafter.propose(self._most, price=self._price).tokens, np.intc)
