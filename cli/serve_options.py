"""The options of `ngramspec serve`, in groups, and what they are turned into."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import psutil
import typer

from ngramspec.llama.passes import MAX_EVALUATE

from .console import usage_error
from .sampling_options import flag, settings_of, with_settings

if TYPE_CHECKING:
    from ngramspec.server.sampling_fields import SamplingDefaults

LONGEST_DRAFT = MAX_EVALUATE - 1


@with_settings
class DefaultSampling:
    """How a token is chosen where a request does not say so."""

    temperature: Annotated[float, flag("temperature")] = 0.8
    seed: Annotated[int, typer.Option("-s", "--seed", min=-1, help="Seed; -1: a random one for each request.")] = -1

    def defaults(self) -> SamplingDefaults:
        """The settings; ends the program if a value is out of its range, or two contradict each other."""
        from ngramspec.server.sampling_fields import SamplingDefaults

        try:
            sampling = settings_of(self, {"seed": max(0, self.seed)})
        except ValueError as error:
            usage_error(str(error))
        return SamplingDefaults(sampling, None if self.seed == -1 else self.seed)


@dataclass(frozen=True, slots=True)
class AccessOptions:
    """Where the server listens, and to whom."""

    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0: all of this machine's.")] = "127.0.0.1"
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0: any that is free.")] = 8080
    api_key: Annotated[
        str | None,
        typer.Option(
            "--api-key",
            envvar="NGRAMSPEC_API_KEY",
            help="Key that requests must show; default: $NGRAMSPEC_API_KEY, or none.",
            show_default=False,
        ),
    ] = None
    cors: Annotated[
        list[str] | None,
        typer.Option("--cors", metavar="ORIGIN", help="Pages that may ask: https://example.org; *: all; repeatable."),
    ] = None
    allow_host: Annotated[
        list[str] | None,
        typer.Option("--allow-host", metavar="NAME", help="A further name of this server; repeatable."),
    ] = None

    def __post_init__(self) -> None:
        if self.api_key is not None and not self.api_key.strip():
            usage_error("--api-key is empty; leave it out, or give some text")


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """How requests share the model, and what they are drafted from."""

    parallel: Annotated[
        int, typer.Option("-np", "--parallel", min=1, max=MAX_EVALUATE, help="Requests at once; others wait.")
    ] = 4
    cache_ram: Annotated[
        int | None,
        typer.Option(
            "--cache-ram",
            metavar="MIB",
            min=0,
            help="RAM for conversations that left their slot; default: a quarter of what is free.",
            show_default=False,
        ),
    ] = None
    no_draft: Annotated[bool, typer.Option("--no-draft", help="Plain decoding: one token per pass.")] = False
    draft_max: Annotated[
        int | None, typer.Option(min=1, max=LONGEST_DRAFT, help=f"Most tokens in a draft; default: {LONGEST_DRAFT}.")
    ] = None
    memory: Annotated[
        str | None,
        typer.Option(
            "--memory",
            metavar="NAME",
            help="Draft from this memory too (ngramspec memory --help); default: 'default', if it exists.",
            show_default=False,
        ),
    ] = None
    no_memory: Annotated[
        bool,
        typer.Option(
            "--no-memory",
            help="Draft from a request's own context alone, not from other answers, nor from what drafts have learnt.",
        ),
    ] = False

    spm_infill: Annotated[
        bool, typer.Option("--spm-infill", help="Gaps are shown with what is behind them first, as Codestral wants it.")
    ] = False

    def __post_init__(self) -> None:
        if self.memory is not None and (self.no_memory or self.no_draft):
            usage_error(f"--memory and {'--no-memory' if self.no_memory else '--no-draft'} exclude each other")

    @property
    def longest(self) -> int | None:
        """The longest draft that there can be, as far as the options say so."""
        return 1 if self.no_draft else self.draft_max

    @property
    def cache_room(self) -> int:
        """Bytes for conversations that left their slot."""
        return int(psutil.virtual_memory().available) // 4 if self.cache_ram is None else self.cache_ram * 2**20
