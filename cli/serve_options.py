"""The options of `ngramspec serve`, and what they are turned into."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ngramspec.llama.embedder import Pooling
from ngramspec.llama.passes import MAX_EVALUATE
from ngramspec.llama.vocabulary import CHATML
from ngramspec.sampling.option import between, option, options, within

from .console import fail, note, read_text, usage_error
from .options import check_predict

LONGEST_DRAFT = MAX_EVALUATE - 1

MOST_EMBEDDED = 8192
"""Most tokens of a text to embed: OpenAI's models take as many, and the cache of more would surprise."""

_CHANGES_NOTHING = "Changes nothing: "


def _unneeded(*flags: str, help: str) -> bool:
    """An option of llama-server's that is taken so that its command lines carry over."""
    return option(False, *flags, help=f"{_CHANGES_NOTHING}{help}.")


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """Where the server listens and to whom, how requests share the model, and whether texts are made vectors of."""

    host: str = option("127.0.0.1", help="Address to listen on; 0.0.0.0: all of this machine's.")
    port: int = option(8080, help="Port; 0: any that is free.", allowed=between(0, 65535))
    api_key: str | None = option(None, help="Key that requests must show; default: $NGRAMSPEC_API_KEY, or none.")
    api_key_file: Path | None = option(None, metavar="FILE", help="Keys that requests may show, one a line.")
    ssl_key_file: Path | None = option(None, metavar="FILE", help="Answer by HTTPS, with this private key.")
    ssl_cert_file: Path | None = option(None, metavar="FILE", help="The certificate of that key, PEM.")
    cors: list[str] | None = option(
        None, metavar="ORIGIN", help="Pages that may ask: https://example.org; *: all; repeatable."
    )
    allow_host: list[str] | None = option(None, metavar="NAME", help="A further name of this server; repeatable.")
    parallel: int = option(
        4, "-np", "--parallel", help="Requests at once; others wait.", allowed=between(1, MAX_EVALUATE)
    )
    cache_ram: int | None = option(
        None,
        metavar="MIB",
        help="RAM for conversations that left their slot; default: a quarter of what is free.",
        allowed=within(0),
    )
    slot_save_path: Path | None = option(
        None,
        metavar="FOLDER",
        help="POST /slots/N?action=save|restore may write and read files here; default: it may not.",
    )
    predict: int = option(-1, "-n", "--predict", help="Most tokens where a request does not say; -1: the context's.")
    chat_template: str | None = option(
        None, metavar="JINJA|chatml", help="Lay conversations out by this template, not the model's."
    )
    chat_template_file: Path | None = option(None, metavar="FILE", help="The same, from a file.")
    spm_infill: bool = option(False, help="Gaps are shown with what is behind them first, as Codestral wants it.")
    embeddings: bool = option(
        False,
        "--embeddings",
        "--embedding",
        help="Answer /v1/embeddings too. Takes memory for a context as large as a request's, at most"
        f" {MOST_EMBEDDED} tokens.",
    )
    pooling: Pooling | None = option(
        None,
        help="What a text's vector is made of: its tokens' mean, the first, the last; none: one for each token;"
        " default: what the file says.",
    )
    embd_normalize: int | None = option(
        None,
        help="How vectors are scaled: -1 not at all, 0 to 16 bits, 2 to length 1, p to p-norm 1; default: 2.",
        allowed=within(-1),
    )

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
        check_predict(self.predict)
        if self.slot_save_path is not None and not self.slot_save_path.is_dir():
            fail(f"--slot-save-path: there is no folder {self.slot_save_path}")
        if self.chat_template is not None and self.chat_template_file is not None:
            usage_error("--chat-template and --chat-template-file exclude each other")
        if self.chat_template not in (None, "chatml") and "{" not in str(self.chat_template):
            usage_error("--chat-template takes a template of Jinja, or chatml")
        if not self.embeddings and (self.pooling is not None or self.embd_normalize is not None):
            usage_error("--pooling and --embd-normalize are for --embeddings")

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

    @property
    def template(self) -> str | None:
        """The chat template in place of the model's; None: the model's own. Ends the program if it cannot be read."""
        if self.chat_template_file is not None:
            return read_text(self.chat_template_file)
        return CHATML if self.chat_template == "chatml" else self.chat_template


@dataclass(frozen=True, slots=True)
class Unneeded:
    """Options of llama-server's that change nothing here."""

    jinja: bool = _unneeded(help="chat templates are Jinja")
    cont_batching: bool = _unneeded("-cb", "--cont-batching", help="requests share passes")
    metrics: bool = _unneeded(help="/metrics is there")
    slots: bool = _unneeded(help="/slots is there")
    reasoning_format: Literal["auto", "deepseek"] | None = option(
        None, help=f"{_CHANGES_NOTHING}thoughts come as reasoning_content."
    )
    verbose: bool = _unneeded("-v", "--verbose", help="requests are logged, their texts are not")

    def tell(self) -> None:
        """Say on stderr which of them were given."""
        for name, known in options(self).items():
            if getattr(self, name):
                note(f"{known.flags[0]} {known.help[0].lower()}{known.help[1:].rstrip('.')} anyway")
