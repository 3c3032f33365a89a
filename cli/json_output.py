"""`--json FILE|-`."""

from __future__ import annotations

import json
from typing import Any

import typer

from .output_file import OutputFile


def json_option(what: str) -> Any:
    """The option that names the file, of a command that writes `what` to it."""
    return typer.Option(
        "--json", metavar="FILE|-", help=f"Write {what} as JSON; -: to stdout, and no table.", show_default=False
    )


class JsonOutput(OutputFile):
    """An `OutputFile` for one document."""

    def write(self, document: dict[str, Any]) -> None:
        """Write it, if it is wanted."""
        self.write_text(json.dumps(document, indent=2) + "\n")
