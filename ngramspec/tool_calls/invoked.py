"""Calls as `<invoke name="f">` with parameters in tags: DeepSeek from V3.2 on, and MiniMax."""

from __future__ import annotations

from ngramspec.tool_calls.answer import Answer
from ngramspec.tool_calls.forms import Form, Tools, read_each
from ngramspec.tool_calls.hermes import TAG, read_hermes, write_hermes
from ngramspec.tool_calls.reader import Reader, Reads
from ngramspec.tool_calls.tagged import Tags, read_tagged


def _form(name: str, signs: tuple[tuple[str, ...], ...], rows: dict[str, str], mark: str) -> Form:
    """A family whose rows of calls are opened and closed by `rows`, and whose tags begin with `mark`."""
    item = f'<{mark}invoke name="'
    tags = Tags(f'<{mark}parameter name="', '"', ">", f"</{mark}parameter>", f"</{mark}invoke>")

    def read(reader: Reader, answer: Answer, tools: Tools, start: str) -> Reads[bool]:
        if start == TAG:
            return (yield from read_hermes(reader, answer, tools, start))

        def one() -> Reads[bool]:
            parts: list[str] = []
            yield from reader.until(('">',), parts.append)
            called = "".join(parts)
            return bool(called) and (yield from read_tagged(reader, answer, called, tools.get(called), tags))

        end = rows.get(start) or next(iter(rows.values()))
        return (yield from read_each(reader, start, item, end, one))

    return Form(name, signs, (*rows, item, TAG), read, write_hermes)


_DSML = "｜DSML｜"
DEEPSEEK_INVOKED = _form(
    "deepseek-v3.2",
    ((_DSML,),),
    {f"<{_DSML}{row}>": f"</{_DSML}{row}>" for row in ("function_calls", "tool_calls")},
    _DSML,
)
MINIMAX = _form("minimax", (("<minimax:tool_call>",),), {"<minimax:tool_call>": "</minimax:tool_call>"}, "")
