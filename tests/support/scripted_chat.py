"""The command line with a model that answers with a file's text: scripted_chat.py FILE SECONDS_PER_PIECE ARGUMENT..."""

from __future__ import annotations

import math
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from ngramspec_cli import markdown
from ngramspec_cli.app import run

from ngramspec.decoding.decoder import SpeculativeDecoder
from ngramspec.llama.vocabulary import Vocabulary
from ngramspec.steps import Step

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: {# <think> </think> #}"


def make_generate(text: str, pace: float = 0.0) -> Callable[..., Iterator[Step]]:
    """Return a replacement of `SpeculativeDecoder.generate` that yields a text word by word, every `pace` seconds.

    After "PAUSE" it waits until the terminal has another size.
    """

    def say(*_: object, **__: object) -> Iterator[Step]:
        for number, piece in enumerate(re.findall(r"\s*\S+|\s+", text)):
            pauses = "PAUSE" in piece
            size = os.get_terminal_size() if pauses else None
            time.sleep(0.1 if pauses else pace)  # After this delay the terminal shows the word at once.
            yield Step((1,), (piece.replace("PAUSE", ""),), seconds=pace, elapsed=pace, batch=min(number, 1))
            while pauses and os.get_terminal_size() == size:
                time.sleep(0.01)
        yield Step((2,), ("",), seconds=pace, elapsed=pace, batch=1, stop="eog")

    return say


if __name__ == "__main__":
    markdown.SHARE = math.inf  # so that a busy machine does not delay the text
    Vocabulary.chat_template = TEMPLATE  # type: ignore[assignment,method-assign]
    SpeculativeDecoder.generate = make_generate(Path(sys.argv[1]).read_text("utf-8"), float(sys.argv[2]))  # type: ignore[method-assign]
    sys.exit(run(sys.argv[3:]))
