"""Measure the length of suggestions within an editor's deadline, for gaps in real code and requests like llama.vim's.

    ngramspec serve coder.gguf --port 8012 &
    ngramspec serve coder.gguf --port 8013 --no-draft &
    python tools/measure/infill.py drafts=http://127.0.0.1:8012 plain=http://127.0.0.1:8013

Any server with `/infill` is supported, including llama-server. A gap begins at a random line of a source file, by
default in Python's standard library. The server gets 256 lines before the gap, 64 lines after it, and 16 chunks of the
other files in the same folder. For every gap and deadline the servers get the request in turn, in a changing order, so
that servers on the same machine never run at the same time. Before the first deadline each server gets a request with a
deadline of 1 ms, so that the figures exclude the time of the prompt. "right" is the number of bytes that match the
file.
"""

from __future__ import annotations

import argparse
import json
import random
import sysconfig
import urllib.request
from collections import defaultdict
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple

from ngramspec.tokens import common_prefix

BEFORE, AFTER, CHUNK, CHUNKS = 256, 64, 64, 16
"""Numbers of lines before and after the gap, of lines in a chunk and of chunks: llama.vim's defaults."""

OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # requests must not use a proxy


class Gap(NamedTuple):
    """Gap in a file with the context that an editor sends.

    Attributes:
        before: Lines before the gap.
        after: Lines after the gap.
        truth: Text of the file from the start of the gap.
        indent: Indent of the first line in spaces; a line with a smaller indent ends a suggestion.
        chunks: Chunks of other files.
    """

    before: str
    after: str
    truth: str
    indent: int
    chunks: list[dict[str, str]]


def choose_gaps(files: list[Path], count: int, lines: int, seed: int, free: bool) -> list[Gap]:
    """Return random gaps of `lines` lines; `free` means that a suggestion may leave its block."""
    rng = random.Random(seed)
    texts = {path: path.read_text("utf-8", "replace").splitlines(keepends=True) for path in files}
    long = [path for path, text in texts.items() if len(text) > 8 * lines]
    result = []
    while len(result) < count:
        path = rng.choice(long)
        text = texts[path]
        at = rng.randrange(2 * lines, len(text) - 2 * lines)
        if not text[at].strip():
            continue
        siblings = [file for file in files if file.parent == path.parent and file != path and texts[file]]
        chunks = []
        for _ in range(CHUNKS if siblings else 0):
            file = rng.choice(siblings)
            start = rng.randrange(len(texts[file]))
            chunks.append({"filename": file.name, "text": "".join(texts[file][start : start + CHUNK])})
        result.append(
            Gap(
                "".join(text[max(0, at - BEFORE) : at]),
                "".join(text[at + lines : at + lines + AFTER]),
                "".join(text[at:]),
                0 if free else len(text[at]) - len(text[at].lstrip()),
                chunks,
            )
        )
    return result


def ask(url: str, gap: Gap, *, milliseconds: int, max_tokens: int, seed: int, greedy: bool) -> dict[str, Any]:
    """Send a request like llama.vim's to a server and return the response."""
    fields = {
        "id_slot": 0,
        "input_prefix": gap.before,
        "input_suffix": gap.after,
        "input_extra": gap.chunks,
        "prompt": "",
        "n_predict": max_tokens,
        "n_indent": gap.indent,
        **({"temperature": 0} if greedy else {"top_k": 40, "top_p": 0.90, "samplers": ["top_k", "top_p", "infill"]}),
        "stream": False,
        "cache_prompt": True,
        "t_max_prompt_ms": 500,
        "t_max_predict_ms": milliseconds,
        "seed": seed,
    }
    request = urllib.request.Request(
        f"{url.rstrip('/')}/infill", json.dumps(fields).encode(), {"Content-Type": "application/json"}
    )
    with OPENER.open(request, timeout=600) as response:
        answer: dict[str, Any] = json.load(response)
    return answer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("servers", nargs="+", metavar="NAME=URL")
    parser.add_argument("--code", type=Path, default=Path(sysconfig.get_paths()["stdlib"]), help="folder of *.py")
    parser.add_argument("--gaps", type=int, default=40)
    parser.add_argument("--lines", type=int, default=16, help="of a gap")
    parser.add_argument("--most", type=int, default=512, help="tokens of a suggestion")
    parser.add_argument("--deadlines", type=int, nargs="+", default=[250, 1000], help="milliseconds")
    parser.add_argument("--free", action="store_true", help="no line ends a suggestion by being indented less")
    parser.add_argument("--greedy", action="store_true", help="greedy decoding without the infill sampler")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    settings = {"max_tokens": options.most, "seed": options.seed, "greedy": options.greedy}
    servers = dict(server.split("=", 1) for server in options.servers)
    files = sorted(
        path for path in options.code.rglob("*.py") if "test" not in str(path).lower() and "-packages" not in str(path)
    )
    results: dict[tuple[str, int], list[tuple[int, int, int, float, int]]] = defaultdict(list)
    for number, gap in enumerate(choose_gaps(files, options.gaps, options.lines, options.seed, options.free)):
        order = list(servers)[number % len(servers) :] + list(servers)[: number % len(servers)]
        for name in order:
            ask(servers[name], gap, milliseconds=1, **settings)
        for deadline in options.deadlines:
            for name in order:
                answer = ask(servers[name], gap, milliseconds=deadline, **settings)
                text, times = answer["content"], answer["timings"]
                n_correct = common_prefix(list(text.encode()), list(gap.truth.encode()))
                n_accepted = times.get("draft_n_accepted", 0)
                results[name, deadline].append(
                    (len(text), times["predicted_n"], n_correct, times["predicted_ms"], n_accepted)
                )
    print("| deadline, ms | server | characters, mean | median | tokens, mean | tokens/s | from drafts | right, mean |")
    print("|---|---|---|---|---|---|---|---|")
    for deadline in options.deadlines:
        for name in servers:
            characters, tokens, n_correct, times_ms, n_accepted = zip(*results[name, deadline], strict=True)
            speed = sum(tokens) / max(sum(times_ms), 1e-9) * 1000
            print(
                f"| {deadline} | {name} | {mean(characters):.1f} | {median(characters):g} | {mean(tokens):.1f} |"
                f" {speed:.1f} | {sum(n_accepted) / max(1, sum(tokens)):.0%} | {mean(n_correct):.1f} |"
            )


if __name__ == "__main__":
    main()
