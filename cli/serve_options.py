"""The options of `ngramspec serve`, in groups, and what they are turned into."""

from __future__ import annotations

import ssl
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, cast, get_type_hints

import psutil
import typer

from ngramspec.llama.embedder import POOLINGS, Pooling
from ngramspec.llama.passes import MAX_EVALUATE
from ngramspec.llama.vocabulary import CHATML
from ngramspec.sampling.settings import Sampling

from .console import fail, note, read_text, usage_error
from .options import check_predict
from .sampling_options import flag, settings_of, with_settings

LONGEST_DRAFT = MAX_EVALUATE - 1

MOST_EMBEDDED = 8192
"""Most tokens of a text to embed: OpenAI's models take as many, and the cache of more would surprise."""


@with_settings
class DefaultSampling:
    """How a token is chosen where a request does not say so."""

    temperature: Annotated[float, flag("temperature")] = 0.8
    seed: Annotated[int, typer.Option("-s", "--seed", min=-1, help="Seed; -1: a random one for each request.")] = -1

    def defaults(self) -> tuple[Sampling, int | None]:
        """The settings, and the seed, None for random ones; ends the program where they cannot be."""
        try:
            sampling = settings_of(self, {"seed": max(0, self.seed)})
        except ValueError as error:
            usage_error(str(error))
        return sampling, None if self.seed == -1 else self.seed


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
        ),
    ] = None
    api_key_file: Annotated[
        Path | None, typer.Option("--api-key-file", metavar="FILE", help="Keys that requests may show, one a line.")
    ] = None
    ssl_key_file: Annotated[
        Path | None, typer.Option("--ssl-key-file", metavar="FILE", help="Answer by HTTPS, with this private key.")
    ] = None
    ssl_cert_file: Annotated[
        Path | None, typer.Option("--ssl-cert-file", metavar="FILE", help="The certificate of that key, PEM.")
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
        if (self.ssl_key_file is None) != (self.ssl_cert_file is None):
            usage_error("--ssl-key-file and --ssl-cert-file need each other")
        if self.ssl_key_file is not None and self.ssl_cert_file is not None:
            try:
                ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(self.ssl_cert_file, self.ssl_key_file)
            except (OSError, ssl.SSLError) as error:
                fail(f"cannot use the certificate {self.ssl_cert_file}: {error.strerror or error}")

    @property
    def keys(self) -> list[str]:
        """Of which requests must show one; none: they need no key. Ends the program if the file cannot be used."""
        keys = [] if self.api_key is None else [self.api_key]
        if self.api_key_file is not None:
            lines = [line.strip() for line in read_text(self.api_key_file).splitlines()]
            keys += filter(None, lines)
            if not any(lines):
                fail(f"{self.api_key_file} holds no key")
        return keys


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
        ),
    ] = None
    slot_save_path: Annotated[
        Path | None,
        typer.Option(
            "--slot-save-path",
            metavar="FOLDER",
            help="POST /slots/N?action=save|restore may write and read files here; default: it may not.",
        ),
    ] = None
    predict: Annotated[
        int, typer.Option("-n", "--predict", help="Most tokens where a request does not say; -1: the context's.")
    ] = -1
    chat_template: Annotated[
        str | None,
        typer.Option(
            "--chat-template", metavar="JINJA|chatml", help="Lay conversations out by this template, not the model's."
        ),
    ] = None
    chat_template_file: Annotated[
        Path | None, typer.Option("--chat-template-file", metavar="FILE", help="The same, from a file.")
    ] = None
    spm_infill: Annotated[
        bool, typer.Option("--spm-infill", help="Gaps are shown with what is behind them first, as Codestral wants it.")
    ] = False

    def __post_init__(self) -> None:
        check_predict(self.predict)
        if self.slot_save_path is not None and not self.slot_save_path.is_dir():
            fail(f"--slot-save-path: there is no folder {self.slot_save_path}")
        if self.chat_template is not None and self.chat_template_file is not None:
            usage_error("--chat-template and --chat-template-file exclude each other")
        if self.chat_template not in (None, "chatml") and "{" not in str(self.chat_template):
            usage_error("--chat-template takes a template of Jinja, or chatml")

    @property
    def template(self) -> str | None:
        """The chat template in place of the model's; None: the model's own. Ends the program if it cannot be read."""
        if self.chat_template_file is not None:
            return read_text(self.chat_template_file)
        return CHATML if self.chat_template == "chatml" else self.chat_template

    @property
    def cache_room(self) -> int:
        """Bytes for conversations that left their slot."""
        return int(psutil.virtual_memory().available) // 4 if self.cache_ram is None else self.cache_ram * 2**20


@dataclass(frozen=True, slots=True)
class EmbeddingOptions:
    """Whether texts are made vectors of, and how."""

    embeddings: Annotated[
        bool,
        typer.Option(
            "--embeddings",
            "--embedding",
            help="Answer /v1/embeddings too. Takes memory for a context as large as a request's, at most"
            f" {MOST_EMBEDDED} tokens.",
        ),
    ] = False
    pooling: Annotated[
        str | None,
        typer.Option(
            "--pooling",
            metavar="|".join(POOLINGS),
            help="What a text's vector is made of: its tokens' mean, the first, the last; none: one for each token;"
            " default: what the file says.",
        ),
    ] = None
    embd_normalize: Annotated[
        int | None,
        typer.Option(
            "--embd-normalize",
            min=-1,
            help="How vectors are scaled: -1 not at all, 0 to 16 bits, 2 to length 1, p to p-norm 1; default: 2.",
        ),
    ] = None

    def __post_init__(self) -> None:
        if self.pooling == "rank":
            usage_error("--pooling rank: documents are not ranked here")
        if self.pooling not in (None, *POOLINGS):
            usage_error(f"--pooling is {self.pooling!r}, but must be one of: {', '.join(POOLINGS)}")
        if not self.embeddings and (self.pooling is not None or self.embd_normalize is not None):
            usage_error("--pooling and --embd-normalize are for --embeddings")

    @property
    def pooled(self) -> Pooling | None:
        """`pooling`, checked."""
        return cast("Pooling | None", self.pooling)


def _anyway(*flags: str, help: str) -> Any:
    return typer.Option(*flags, help=f"Changes nothing: {help}.")


@dataclass(frozen=True, slots=True)
class AnywayOptions:
    """Options of llama-server's that are taken so that its command lines carry over."""

    jinja: Annotated[bool, _anyway("--jinja", help="chat templates are Jinja")] = False
    cont_batching: Annotated[bool, _anyway("-cb", "--cont-batching", help="requests share passes")] = False
    metrics: Annotated[bool, _anyway("--metrics", help="/metrics is there")] = False
    slots: Annotated[bool, _anyway("--slots", help="/slots is there")] = False
    verbose: Annotated[bool, _anyway("-v", "--verbose", help="requests are logged, their texts are not")] = False
    lora: Annotated[str | None, typer.Option("--lora", metavar="FILE", help="Refused: adapters are not loaded.")] = None

    def __post_init__(self) -> None:
        if self.lora is not None:
            usage_error("--lora: adapters are not loaded; merge it into the model with llama.cpp's llama-export-lora")

    def tell(self) -> None:
        """Say on stderr which of them were given."""
        hints = get_type_hints(AnywayOptions, include_extras=True)
        for field in fields(self):
            if getattr(self, field.name) is True:
                (option,) = hints[field.name].__metadata__
                # typer takes the first flag for a default where the description stands in an annotation.
                note(f"{option.default} {option.help[0].lower()}{option.help[1:].rstrip('.')} anyway")
