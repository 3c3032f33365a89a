"""`gap_prompt`: the prompt for what belongs between two texts, or the error that a client is told."""

from __future__ import annotations

from collections.abc import Sequence

from ngramspec.fill_in import Extra, Limits, NoFillIn, fill_in
from ngramspec.server.errors import ApiError
from ngramspec.server.served import ServedModel


def gap_prompt(
    model: ServedModel,
    before: str,
    after: str,
    *,
    prompt: str = "",
    others: Sequence[Extra] = (),
    limits: Limits | None = None,
) -> list[int]:
    """See `ngramspec.fill_in.fill_in`.

    Raises:
        ApiError: the model cannot fill gaps.
    """
    try:
        return fill_in(
            model.vocabulary,
            before,
            after,
            prompt=prompt,
            others=others,
            limits=limits,
            suffix_first=model.suffix_first,
        )
    except NoFillIn as error:
        raise ApiError(400, str(error), type="not_supported_error") from error
