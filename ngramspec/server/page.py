"""The chat page at `/`: one file that asks nothing of any other host, and runs no script but its own."""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from importlib.resources import files

from starlette.responses import HTMLResponse, Response

from ngramspec.server.fields import Fields
from ngramspec.server.served import Server


def allowed(html: str, tag: str) -> str:
    """The inline elements of a kind as sources of a Content-Security-Policy: the hashes of their texts."""
    texts = re.findall(rf"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
    return " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" for text in texts)


def content_security_policy(html: str) -> str:
    """What the page may do: run and style by what stands in it, and speak to the server that it came from."""
    return "; ".join(
        (
            "default-src 'none'",
            f"script-src {allowed(html, 'script')}",
            f"style-src {allowed(html, 'style')}",
            "connect-src 'self'",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
            # Text that is made into elements is an error, whoever wrote it.
            "require-trusted-types-for 'script'",
            "trusted-types 'none'",
        )
    )


@cache
def contents() -> tuple[str, dict[str, str]]:
    """The page and its headers."""
    html = files("ngramspec.server").joinpath("page.html").read_text("utf-8")
    return html, {
        "Content-Security-Policy": content_security_policy(html),
        "Cache-Control": "no-cache",
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
    }


async def page(_server: Server, _given: Fields) -> Response:
    """Answer with the page."""
    html, headers = contents()
    return HTMLResponse(html, headers=headers)
