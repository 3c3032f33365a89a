"""Options of `ngramspec serve`."""

from __future__ import annotations

import json
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from ngramspec.chat.template import check_variables
from ngramspec.llama.chat_format import builtin_names
from ngramspec.llama.embedder import Pooling
from ngramspec.llama.passes import MAX_EVALUATE
from ngramspec.sampling.settings import allow_int_range, allow_range, option

from .console import fail, read_text, usage_error
from .options import check_predict

MAX_EMBEDDED = 8192
"""Maximum number of tokens of an input to embed, as in OpenAI's models; a larger cache would surprise."""


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """Address, access control, parallel requests and embeddings of the server."""

    alias: str | None = option(
        None,
        "-a",
        "--alias",
        metavar="NAME,...",
        help="Model names for clients, the first one in the alphabet for responses; default: the file name.",
    )
    tags: str | None = option(None, metavar="TAG,...", help="Labels of the model, shown in /v1/models.")
    host: str = option(
        "127.0.0.1",
        metavar="ADDRESS,...",
        help="Addresses to listen on; 0.0.0.0: all IPv4 addresses of this machine.",
    )
    port: int = option(8080, help="Port to listen on; 0: any free port.", allowed=allow_int_range(0, 65535))
    api_key: str | None = option(
        None, help="API key that requests must send, visible in the process list; default: $NGRAMSPEC_API_KEY."
    )
    api_key_file: Path | None = option(
        None,
        metavar="FILE",
        help="File with accepted API keys, one per line; unlike --api-key not visible to other users.",
    )
    ssl_key_file: Path | None = option(None, metavar="FILE", help="Private key for HTTPS (PEM).")
    ssl_cert_file: Path | None = option(None, metavar="FILE", help="Certificate for HTTPS (PEM).")
    cors: list[str] | None = option(
        None,
        "--cors",
        "--cors-origins",
        metavar="ORIGIN,...",
        help="Allowed origins of web pages, such as https://example.org; *: all; repeatable;"
        " pages of this machine are always allowed.",
    )
    allow_host: list[str] | None = option(
        None, metavar="NAME", help="Additional accepted host name of this server; repeatable."
    )
    parallel: int = option(
        4,
        "-np",
        "--parallel",
        help="Maximum number of requests at once; others wait.",
        allowed=allow_int_range(1, MAX_EVALUATE),
    )
    cache_ram: int | None = option(
        None,
        "-cram",
        "--cache-ram",
        metavar="MIB",
        help="Prompt cache in MiB, for conversations evicted from their slot; default: a quarter of free RAM.",
        allowed=allow_range(0),
    )
    slot_save_path: Path | None = option(
        None,
        metavar="FOLDER",
        help="Folder for POST /slots/N?action=save|restore; default: saving is disabled.",
    )
    predict: int = option(
        -1, "-n", "--predict", "--n-predict", help="Default for max_tokens of requests; -1: until the context is full."
    )
    chat_template: str | None = option(
        None,
        metavar="JINJA|NAME",
        help="Chat template, or the name of one of llama.cpp's, instead of the model's own.",
    )
    chat_template_file: Path | None = option(
        None, metavar="FILE", help="File with a chat template, instead of the model's own."
    )
    chat_template_kwargs: str | None = option(
        None,
        metavar="JSON",
        help="Variables of the chat template as a JSON object, for requests that do not set them.",
    )
    batch_size: int | None = option(
        None,
        "-b",
        "--batch-size",
        help="Maximum number of prompt tokens per decode call; limits --ubatch-size.",
        allowed=allow_range(1),
    )
    verbose: bool = option(False, "-v", "--verbose", help="Add the prompt and all settings to responses, as __verbose.")
    metrics: bool = option(False, help="Enable /metrics for Prometheus.")
    no_slots: bool = option(False, help="Disable /slots, which shows the progress of running requests.")
    no_ui: bool = option(False, "--no-ui", "--no-webui", help="Disable the chat page.")
    spm_infill: bool = option(False, help="Use suffix-prefix-middle order for fill-in-the-middle prompts (Codestral).")
    embeddings: bool = option(
        False,
        "--embeddings",
        "--embedding",
        help=f"Enable /v1/embeddings; needs memory for one more context, of at most {MAX_EMBEDDED} tokens.",
    )
    pooling: Pooling | None = option(
        None,
        help="Pooling for embeddings: mean, cls (first token), last, or none (one vector per token);"
        " default: as set in the model file.",
    )
    embd_normalize: int | None = option(
        None,
        help="Normalization of embeddings: -1: none, 0: 16-bit integers, 2: length 1, p: p-norm 1; default: 2.",
        allowed=allow_range(-1),
    )

    def __post_init__(self) -> None:
        if self.api_key is not None and not self.api_key.strip():
            usage_error("--api-key must not be empty")
        if (self.ssl_key_file is None) != (self.ssl_cert_file is None):
            usage_error("--ssl-key-file and --ssl-cert-file must be used together")
        if self.ssl_key_file is not None and self.ssl_cert_file is not None:
            try:
                ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(self.ssl_cert_file, self.ssl_key_file)
            except (OSError, ssl.SSLError) as error:
                fail(f"cannot use the certificate {self.ssl_cert_file}: {error.strerror or error}")
        check_predict(self.predict)
        if self.slot_save_path is not None and not self.slot_save_path.is_dir():
            fail(f"--slot-save-path: no such folder: {self.slot_save_path}")
        if self.chat_template is not None and self.chat_template_file is not None:
            usage_error("--chat-template cannot be combined with --chat-template-file")
        if (
            self.chat_template is not None
            and "{" not in self.chat_template
            and self.chat_template not in builtin_names()
        ):
            names = ", ".join(builtin_names())
            usage_error(f"--chat-template: {self.chat_template!r} is neither a Jinja template nor one of: {names}")
        self.variables  # noqa: B018 - checks them
        if not self.embeddings and (self.pooling is not None or self.embd_normalize is not None):
            usage_error("--pooling and --embd-normalize require --embeddings")

    @property
    def hosts(self) -> list[str]:
        """Addresses to listen on; exits without one."""
        return _split(self.host) or usage_error("--host must not be empty")

    @property
    def names(self) -> list[str]:
        """Names of the model for clients, sorted as in llama-server; empty means the name of its file."""
        return sorted(set(_split(self.alias or "")))

    @property
    def labels(self) -> list[str]:
        """Labels of the model for clients."""
        return _split(self.tags or "")

    @property
    def origins(self) -> list[str]:
        """Allowed origins of web pages, in addition to those of this machine."""
        return [name for text in self.cors or () for name in _split(text) if name != "localhost"]

    @property
    def keys(self) -> list[str]:
        """Accepted API keys; empty means that no key is required. Exits if the file cannot be used."""
        keys = [] if self.api_key is None else [self.api_key]
        if self.api_key_file is not None:
            lines = [line.strip() for line in read_text(self.api_key_file).splitlines()]
            keys += filter(None, lines)
            if not any(lines):
                fail(f"{self.api_key_file} contains no key")
        return keys

    @property
    def template(self) -> str | None:
        """Chat template that replaces the model's; `None` means the model's own. Exits if the file cannot be read."""
        if self.chat_template_file is not None:
            return read_text(self.chat_template_file)
        return self.chat_template

    @property
    def variables(self) -> Mapping[str, Any]:
        """Variables of the chat template. Exits if they cannot be used."""
        if self.chat_template_kwargs is None:
            return {}
        try:
            variables = json.loads(self.chat_template_kwargs)
        except (ValueError, RecursionError) as error:
            usage_error(f"--chat-template-kwargs is not valid JSON: {error}")
        try:
            check_variables(variables)
        except ValueError as error:
            usage_error(f"--chat-template-kwargs: {error}")
        return cast(Mapping[str, Any], variables)


def _split(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]
