"""Options of llama.cpp's programs that have no effect here or are not supported.

`NoEffect` accepts options without effect, so that users can paste command lines of llama-server. `REASONS` explains
why the others are not supported.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ngramspec.loading.settings import LoadSettings
from ngramspec.sampling.settings import option, options

from .console import note


def _ignore(*flags: str, help: str) -> bool:
    """Return an option without a value that the help omits."""
    return option(False, *flags, help=help, is_hidden=True)


def _ignore_value(*flags: str, help: str) -> str | None:
    """Return an option with a value that the help omits."""
    return option(None, *flags, help=help, is_hidden=True)


_LENGTH = "the measured cost of a batch determines the draft length; --draft-max limits it"
_LOGGING = "the log has one entry per request on stderr"
_ALWAYS = "jinja", "cont_batching", "slots", "reasoning_format"
"""Options for behaviour that is always on, which need no note."""


@dataclass(frozen=True, slots=True)
class NoEffect:
    """Options of llama-server that are accepted and change nothing; the server's README lists them."""

    jinja: bool = _ignore(help="chat templates use Jinja, except those of llama.cpp")
    cont_batching: bool = _ignore("-cb", "--cont-batching", help="continuous batching is always on")
    slots: bool = _ignore(help="/slots is enabled unless --no-slots is set")
    reasoning_format: Literal["auto", "deepseek"] | None = option(
        None, help="reasoning is always returned as reasoning_content", is_hidden=True
    )
    kv_unified: bool = _ignore(
        "-kvu", "--kv-unified", "-no-kvu", "--no-kv-unified", help="each request has its own context of -c tokens"
    )
    swa_full: bool = _ignore(help="sliding windows keep what a rollback needs")
    no_jinja: bool = _ignore(help="chat templates use Jinja, except those of llama.cpp")
    no_warmup: bool = _ignore("--no-warmup", "--warmup", help="the cost of batches is measured once per model")
    mlock: bool = _ignore(help="the system decides which weights stay in memory")
    no_mmproj: bool = _ignore("--no-mmproj", "--no-mmproj-auto", help="the server accepts only text")
    no_context_shift: bool = _ignore(help="a response always ends when its context is full")
    cache_prompt: bool = _ignore(help="the cache is always used unless a request sets cache_prompt to false")
    cache_reuse: str | None = _ignore_value(help="the cache is used up to the first token that differs")
    cache_idle_slots: bool = _ignore(
        "--no-cache-idle-slots", "--cache-idle-slots", help="idle slots keep their tokens until they are needed"
    )
    backend_sampling: bool = _ignore("-bs", "--backend-sampling", help="samplers run on the CPU")
    op_offload: bool = _ignore(help="it is on unless --no-op-offload is set")
    spec_default: bool = _ignore(help="drafting is always on; --no-draft turns it off")
    spec_type: str | None = _ignore_value(help="drafting is always on; --no-draft turns it off")
    spec_draft_n_min: str | None = _ignore_value("--spec-draft-n-min", "--draft-min", "--draft-n-min", help=_LENGTH)
    spec_draft_p_min: str | None = _ignore_value("--spec-draft-p-min", "--draft-p-min", help=_LENGTH)
    threads_http: str | None = _ignore_value(help="one thread handles all connections")
    timeout: str | None = _ignore_value("-to", "--timeout", help="responses have no time limit")
    verbosity: str | None = _ignore_value("-lv", "--verbosity", "--log-verbosity", help=_LOGGING)
    log_format: bool = _ignore(
        *("--log-prefix", "--no-log-prefix", "--log-timestamps", "--no-log-timestamps", "--perf", "--no-perf"),
        help=_LOGGING,
    )

    def report(self) -> None:
        """Print a note for each given option that users could expect to have an effect."""
        for name, spec in options(self).items():
            if name not in _ALWAYS and getattr(self, name):
                flag = next(flag for flag in spec.flags if flag.startswith("--"))
                note(f"{flag} has no effect: {spec.help}")


_FLAGS = {
    "the server accepts only text": "--mmproj -mm --mmproj-url -mmu --image-min-tokens --image-max-tokens --media-path",
    "ranking is not supported": "--rerank --reranking",
    "a response ends when its context is full; set a larger -c": "--context-shift",
    "set -np 1 to run one request at a time": "-nocb --no-cont-batching",
    "set cache_prompt to false in the requests": "--no-cache-prompt",
    "a response ends when its context is full": "--keep",
    "a server has one model; start one server per model": (
        "--models-dir --models-preset --models-max --no-models-autoload"
    ),
    "the model stays loaded; stop the server to free its memory": "--sleep-idle-seconds",
    "-ngl auto fits the model into GPU memory, -ngl all does not": "-fit --fit -fitt --fit-target -fitc --fit-ctx",
    "the KV cache is on the devices of its layers; set -ngl": "-nkvo --no-kv-offload -kvo --kv-offload",
    "tensors of the draft model cannot be placed one by one; set -ngld or -devd": (
        "-otd --override-tensor-draft -cmoed --cpu-moe-draft -ncmoed --n-cpu-moe-draft"
    ),
    "use --override-tensor": "-ncffn --n-cpu-ffn",
    "use ngramspec info --list-devices": "--list-devices",
    "llama.cpp chooses the buffers for transfers to GPUs": "--no-host",
    "the server runs no tools; clients do": (
        "--tools --tools-runtime --agent -ag --ui-mcp-proxy --webui-mcp-proxy --mcp-servers-config --mcp-servers-json"
    ),
    "edit the metadata of the model file instead": (
        "--rope-scaling --rope-scale --rope-freq-base --rope-freq-scale --yarn-orig-ctx --yarn-ext-factor "
        "--yarn-attn-factor --override-kv"
    ),
    "self-extend is not supported; set a larger -c": "-gan --grp-attn-n -gaw --grp-attn-w",
    "only LoRA adapters are supported; use --lora": "--control-vector --control-vector-scaled",
    "use taskset, numactl or nice": "-C --cpu-mask -Cr --cpu-range --cpu-strict --prio --numa",
    "threads wait briefly and then sleep, see -t auto": "--poll",
    "download the file, or name a Hugging Face repository with -hf": "-mu --model-url",
    "name a Hugging Face repository with -hf, or an Ollama model": "-dr --docker-repo",
    "use hf:owner/repo:FILE as MODEL": "-hff --hf-file",
    "set HF_TOKEN": "-hft --hf-token",
    "use -md hf:owner/repo:file-or-quant": "-hfd --hf-repo-draft --spec-draft-hf",
    "drafts cannot be simulated": "--spec-synth-len --spec-synth-rates",
    "the draft model uses f16": "-ctkd --cache-type-k-draft -ctvd --cache-type-v-draft",
    "the chat page is built in; serve other files with a web server": "--path",
    "use a reverse proxy to change paths": "--api-prefix",
    "settings cannot be changed after the server has started": "--props",
    "redirect stderr to a file": "--log-file",
    "redirect stderr to /dev/null": "--log-disable",
    "use --samplers": "--sampler-seq --sampling-seq",
    "the adaptive-p sampler is not supported": "--adaptive-target",
    "only chat and complete have a prompt; bench and verify read --prompts": "-p --prompt",
    "use ngramspec memory": "--lookup-cache-static --lookup-cache-dynamic",
}
"""Flags of llama.cpp's programs that are rejected, by the reason or the alternative."""

SHORT = {
    flag
    for group in (LoadSettings, NoEffect)
    for spec in options(group).values()
    for flag in spec.flags
    if len(flag) > 2 and not flag.startswith("--")
}
"""Short options of several letters, which some commands lack."""

REASONS = {flag: reason for reason, flags in _FLAGS.items() for flag in flags.split()}
"""Reasons why options are rejected, by flag."""
