"""The command line with a model that says what a file says: scripted_chat.py FILE SECONDS_PER_PIECE ARGUMENT..."""

from __future__ import annotations

import math
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from ngramspec_cli import markdown_stream
from ngramspec_cli.app import run

from ngramspec.decoding.decoder import SpeculativeDecoder
from ngramspec.steps import Step


def saying(text: str, pace: float = 0.0) -> Callable[..., Iterator[Step]]:
    """In place of `SpeculativeDecoder.generate`: a text word by word, each `pace` seconds after the one before.

    Behind "PAUSE" there is silence until the terminal has another size.
    """

    def say(*_: object, **__: object) -> Iterator[Step]:
        for number, piece in enumerate(re.findall(r"\s*\S+|\s+", text)):
            pauses = "PAUSE" in piece
            size = os.get_terminal_size() if pauses else None
            time.sleep(0.1 if pauses else pace)  # so long after the last word that it is shown at once
            yield Step((1,), (piece.replace("PAUSE", ""),), seconds=pace, elapsed=pace, batch=min(number, 1))
            while pauses and os.get_terminal_size() == size:
                time.sleep(0.01)
        yield Step((2,), ("",), seconds=pace, elapsed=pace, batch=1, stop="eog")

    return say


if __name__ == "__main__":
    markdown_stream.SHARE = math.inf  # else the busier the machine, the later is shown what is said before a pause
    SpeculativeDecoder.generate = saying(Path(sys.argv[1]).read_text("utf-8"), float(sys.argv[2]))  # type: ignore[method-assign]
    sys.exit(run(sys.argv[3:]))
