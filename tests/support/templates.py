"""llama.cpp's chat templates, which `tools/templates.sh` copies from the sdist of llama-cpp-python."""

from __future__ import annotations

import os
import re
from pathlib import Path

_DEFAULT = Path(__file__).parents[2] / "build" / "templates"
_MARK = re.compile(
    r"<[|/\uff5c]?[A-Za-z_][\w:\u2581|\uff5c-]*>"  # <think>, </think>, <|im_start|>, <|channel>, <channel|>
    r'|<\|"\|>'
    r"|\[/?[A-Za-z_ ]*[A-Z][A-Z_ ]*\]|\]~!?b\[|\[e~\["  # [INST], ]~b[
)


def template_folder() -> Path | None:
    """Return the folder of the templates: $LLAMA_CPP_TEMPLATES or build/templates; `None` if it does not exist."""
    folder = Path(os.environ.get("LLAMA_CPP_TEMPLATES") or _DEFAULT)
    return folder if folder.is_dir() else None


def template_files() -> list[Path]:
    """Return the templates in their order; none without the folder."""
    folder = template_folder()
    return sorted(folder.glob("*.jinja")) if folder else []


def find_marks(template: str) -> set[str]:
    """Return the texts in a template that look like control tokens."""
    return {*_MARK.findall(template)}


ONE_CALL = (
    "{% for m in messages %}{% if m.tool_calls and m.tool_calls | length > 1 %}{{ [] / 1 }}{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}"
    "{% endfor %}{{ tools | tojson }}"
)
"""Template that accepts only one call in a turn, like Llama 3's."""

_VALUES = ", ".join(
    f"'{name}': {name} | default(none)" for name in ("messages", "tools", "enable_thinking", "reasoning_effort")
)
CHAT_VALUES = f"{{{{ {{{_VALUES}}} | tojson }}}}{{# <tool_call> <think> </think> #}}"
"""Template that writes the values that it receives as JSON, and supports reasoning and tool calls."""
