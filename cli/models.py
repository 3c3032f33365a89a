"""`ngramspec models`: the models on this disk, by the names that every command takes."""

from __future__ import annotations

from rich.table import Table

from ngramspec.cost.calibration import kept_steepness
from ngramspec.llama.devices import quantisation
from ngramspec.llama.weights import model_key
from ngramspec.models.find import installed

from .console import guarded_stdout, note
from .view import report_console


def models() -> None:
    """List the models on this disk, by the names that every command takes.

    Those of the Hugging Face cache, which llama.cpp shares, of ollama and of LM Studio, and SmolLM2 where it is
    installed. Any other GGUF file goes by its path.

    T(4)/T(1) is what a pass over four tokens costs here, in passes over one, where the model has run with drafts: the
    nearer to 1, the more drafts pay; at 4 they never do.
    """
    found = list(installed())
    if not found:
        note("no models of Hugging Face, ollama or LM Studio are on this disk; a .gguf file goes by its path")
    headings = ("name", "size", "quantisation", "architecture", "T(4)/T(1)")
    table = Table(*headings, box=None, pad_edge=False, header_style="bold")
    for one in found:
        if one.flaw is not None:
            note(f"{one.name} cannot be used: {one.flaw}")
            continue
        kind = None if one.file_type is None else quantisation(one.file_type)
        steepness = kept_steepness(model_key(one.path))
        told = "" if steepness is None else f"{steepness:.2f}"
        table.add_row(one.name, f"{one.size / 2**20:,.0f} MiB", kind or "?", one.architecture, told)
    with guarded_stdout():
        if table.rows:
            report_console().print(table)
