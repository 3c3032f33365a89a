"""`/infill`: what belongs between two texts, as llama.vim and llama.vscode ask for it.

All fields of `/completion` apply. What an editor sends besides the texts round the cursor are parts of the project's
other files (`input_extra`): the model sees them, and drafts come from them. A request for no token (`n_predict` 0)
only fills the cache. `t_max_prompt_ms` is no limit, as in llama-server: an editor gives up a request that no longer
matters by hanging up, and a prompt that is not read now has to be read for the next one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from starlette.responses import Response

from ngramspec.errors import ModelError
from ngramspec.fill_in import Limits, fill_in
from ngramspec.server.common_fields import read_max_tokens
from ngramspec.server.errors import ApiError
from ngramspec.server.llama_server import continue_prompts
from ngramspec.server.state import Call, ServedModel

NEAR = 2048
"""Most tokens of the texts next to the gap: the size of a batch in llama-server, which that goes by."""

_NAMELESS = "tmp"  # llama-server's name of a file without one


async def infill(call: Call) -> Response:
    """Fill a gap once, or several times."""
    return await continue_prompts(call, [await asyncio.to_thread(_prompt, call)])


def _prompt(call: Call) -> list[int]:
    """The token ids that ask for it; tokenizes."""
    given, model = call.given, call.model
    before, after = given.needed_text("input_prefix"), given.needed_text("input_suffix")
    others = [
        (_NAMELESS if (name := item.text("filename")) is None else name, item.needed_text("text"))
        for item in given.objects("input_extra")
    ]
    prompt = given.text("prompt") or ""
    limits = Limits.within(model.n_ctx, near=NEAR, n_predict=read_max_tokens(given) or 0)
    return gap_prompt(model, before, after, prompt, others, limits)


def gap_prompt(
    model: ServedModel,
    before: str,
    after: str,
    prompt: str = "",
    others: Sequence[tuple[str, str]] = (),
    limits: Limits | None = None,
) -> list[int]:
    """The prompt for what belongs between two texts; see `ngramspec.fill_in.fill_in`.

    Raises:
        ApiError: the model cannot fill gaps.
    """
    first = model.suffix_first
    try:
        return fill_in(model.vocabulary, before, after, prompt=prompt, others=others, limits=limits, suffix_first=first)
    except ModelError as error:
        raise ApiError(400, str(error), type="not_supported_error") from error
