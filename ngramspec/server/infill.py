"""`/infill`: what belongs between two texts, as llama.vim and llama.vscode ask for it.

All fields of `/completion` apply. What an editor sends besides the texts round the cursor are parts of the project's
other files (`input_extra`): the model sees them, and drafts come from them. A request for no token (`n_predict` 0)
only fills the cache. `t_max_prompt_ms` is no limit, as in llama-server: an editor gives up a request that no longer
matters by hanging up, and a prompt that is not read now has to be read for the next one.
"""

from __future__ import annotations

import asyncio

from starlette.responses import Response

from ngramspec.fill_in import Extra, Limits
from ngramspec.server.common_fields import read_max_tokens
from ngramspec.server.fields import Fields
from ngramspec.server.gap import gap_prompt
from ngramspec.server.native import read_tasks, respond
from ngramspec.server.served import ServedModel, Server

NEAR = 2048
"""Most tokens of the texts next to the gap: the size of a batch in llama-server, which that goes by."""

_NAMELESS = "tmp"  # llama-server's name of a file without one


async def infill(server: Server, given: Fields) -> Response:
    """Fill a gap once, or several times."""
    model = server.ready()
    prompt = await asyncio.to_thread(_prompt, model, given)
    tasks = read_tasks(server, model, given, [prompt])
    return await respond(server, given, tasks, listed=len(tasks) > 1)


def _prompt(model: ServedModel, given: Fields) -> list[int]:
    """The token ids that ask for it; tokenizes."""
    before, after = given.needed_text("input_prefix"), given.needed_text("input_suffix")
    others = [
        Extra(_NAMELESS if (name := item.text("filename")) is None else name, item.needed_text("text"))
        for item in given.objects("input_extra")
    ]
    return gap_prompt(
        model,
        before,
        after,
        prompt=given.text("prompt") or "",
        others=others,
        limits=Limits.within(model.n_ctx, near=NEAR, n_predict=read_max_tokens(given) or 0),
    )
