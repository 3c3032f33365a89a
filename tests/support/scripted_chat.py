"""The command line with a model that says what a file says: scripted_chat.py FILE SECONDS_PER_PIECE ARGUMENT..."""

from __future__ import annotations

import math
import os
import re
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from ngramspec_cli import markdown_stream
from ngramspec_cli.app import run

from ngramspec.decoding.decoder import SpeculativeDecoder
from ngramspec.decoding.step import Step


def say(_decoder: SpeculativeDecoder, _prompt: Sequence[int], **_options: object) -> Iterator[Step]:
    """The file, word by word; behind "PAUSE" there is silence until the terminal has another size."""
    text, pace = Path(sys.argv[1]).read_text("utf-8"), float(sys.argv[2])
    for number, piece in enumerate(re.findall(r"\s*\S+|\s+", text)):
        pauses = "PAUSE" in piece
        size = os.get_terminal_size() if pauses else None
        time.sleep(0.1 if pauses else pace)  # so long after the last word that it is shown at once
        yield Step((1,), (piece.replace("PAUSE", ""),), seconds=pace, batch=min(number, 1))
        while pauses and os.get_terminal_size() == size:
            time.sleep(0.01)
    yield Step((2,), ("",), seconds=pace, batch=1, stop="eog")


if __name__ == "__main__":
    markdown_stream.SHARE = math.inf  # else the busier the machine, the later is shown what is said before a pause
    SpeculativeDecoder.generate = say  # type: ignore[assignment, method-assign]
    sys.exit(run(sys.argv[3:]))
