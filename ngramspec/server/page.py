"""The chat page at `/`, made of the files in `web/`, and what renders Markdown for it."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import re
from functools import cache
from importlib.resources import files

from starlette.responses import HTMLResponse, Response

from ngramspec.server.call import Call, json_answer


def hash_of(text: str) -> str:
    """A text as a source of a Content-Security-Policy."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


@cache
def contents() -> tuple[str, dict[str, str]]:
    """The page, with its style sheet and its scripts in it, and its headers."""
    web = files("ngramspec.server").joinpath("web")
    allowed: dict[str, list[str]] = {"style": [], "script": []}

    def inlined(found: re.Match[str]) -> str:
        text = web.joinpath(found["file"]).read_text("utf-8")
        tag = "style" if found["file"].endswith(".css") else "script"
        allowed[tag].append(hash_of(text))
        return f"<{tag}>{text}</{tag}>"

    html = web.joinpath("page.html").read_text("utf-8")
    html = re.sub(
        r'<(?:link rel="stylesheet" href|script src)="(?P<file>\w+\.(?:css|js))">(?:</script>)?', inlined, html
    )
    policy = (
        "default-src 'none'",
        f"script-src {' '.join(allowed['script'])}",
        f"style-src {' '.join(allowed['style'])}",
        "connect-src 'self'",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        # Text that is made into elements is an error, whoever wrote it.
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
    return html, {
        "Content-Security-Policy": "; ".join(policy),
        "Cache-Control": "no-cache",
        "ETag": f'"{hashlib.sha256(html.encode()).hexdigest()[:32]}"',
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
    }


async def page(call: Call) -> Response:
    """Answer with the page, or with 304 where the browser has it."""
    html, headers = contents()
    if call.headers.get("if-none-match") == headers["ETag"]:
        return Response(status_code=304, headers=headers)
    return HTMLResponse(html, headers=headers)


async def markdown(call: Call) -> Response:
    """Answer with a text as elements: `text`, and in `drafted` what of it to mark."""
    from ngramspec.server.markdown import render  # takes a while, and only the page needs it

    text, drafted = call.given.needed_text("text"), call.given.list("drafted")
    for span in drafted:
        if not (isinstance(span, list) and len(span) == 2 and all(isinstance(end, int) for end in span)):
            raise call.given.wrong("drafted", "a list of pairs of numbers")
    blocks, last = await asyncio.to_thread(render, text, sorted(map(tuple, drafted)))
    return json_answer({"blocks": blocks, "last": last})
