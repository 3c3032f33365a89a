"""How long a suggestion gets within an editor's deadline: gaps in real code, asked of servers as llama.vim asks.

    ngramspec serve coder.gguf --port 8012 &
    ngramspec serve coder.gguf --port 8013 --no-draft &
    python tools/measure/infill.py drafts=http://127.0.0.1:8012 plain=http://127.0.0.1:8013

Any server with `/infill` will do, llama-server too. A gap begins at a random line of a file of code (by default of
Python's standard library); the server sees 256 lines before it, 64 after it, and 16 chunks of the same folder's other
files. For every gap and deadline the servers are asked in turn, in an order that changes; before the first deadline
each one is asked for one line, so that the prompt's time is nobody's. "right" counts the bytes that are those of the
file. Servers that are asked on the same machine must not work at the same time: they are not.
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
"""Lines before and after the gap, lines of a chunk, chunks: llama.vim's defaults."""

OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # the servers are not behind a proxy


class Gap(NamedTuple):
    """A place in a file, as an editor sees it.

    Attributes:
        before, after: the lines round it.
        truth: what stands in it, and after it.
        indent: of its first line, in spaces, below which a suggestion ends.
        others: chunks of other files.
    """

    before: str
    after: str
    truth: str
    indent: int
    others: list[dict[str, str]]


def gaps(files: list[Path], count: int, lines: int, seed: int, free: bool) -> list[Gap]:
    """So many gaps, each of so many lines, the same for the same seed. `free`: a suggestion may leave its block."""
    rng = random.Random(seed)
    texts = {path: path.read_text("utf-8", "replace").splitlines(keepends=True) for path in files}
    long = [path for path, text in texts.items() if len(text) > 8 * lines]
    found = []
    while len(found) < count:
        path = rng.choice(long)
        text = texts[path]
        at = rng.randrange(2 * lines, len(text) - 2 * lines)
        if not text[at].strip():
            continue
        near = [other for other in files if other.parent == path.parent and other != path and texts[other]]
        others = []
        for _ in range(CHUNKS if near else 0):
            other = rng.choice(near)
            start = rng.randrange(len(texts[other]))
            others.append({"filename": other.name, "text": "".join(texts[other][start : start + CHUNK])})
        found.append(
            Gap(
                "".join(text[max(0, at - BEFORE) : at]),
                "".join(text[at + lines : at + lines + AFTER]),
                "".join(text[at:]),
                0 if free else len(text[at]) - len(text[at].lstrip()),
                others,
            )
        )
    return found


def ask(url: str, gap: Gap, *, milliseconds: int, most: int, seed: int, greedy: bool) -> dict[str, Any]:
    """What a server answers to llama.vim's request."""
    asked = {
        "id_slot": 0,
        "input_prefix": gap.before,
        "input_suffix": gap.after,
        "input_extra": gap.others,
        "prompt": "",
        "n_predict": most,
        "n_indent": gap.indent,
        **({"temperature": 0} if greedy else {"top_k": 40, "top_p": 0.90, "samplers": ["top_k", "top_p", "infill"]}),
        "stream": False,
        "cache_prompt": True,
        "t_max_prompt_ms": 500,
        "t_max_predict_ms": milliseconds,
        "seed": seed,
    }
    request = urllib.request.Request(
        f"{url.rstrip('/')}/infill", json.dumps(asked).encode(), {"Content-Type": "application/json"}
    )
    with OPENER.open(request, timeout=600) as response:
        told: dict[str, Any] = json.load(response)
    return told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("servers", nargs="+", metavar="NAME=URL")
    parser.add_argument("--code", type=Path, default=Path(sysconfig.get_paths()["stdlib"]), help="folder of *.py")
    parser.add_argument("--gaps", type=int, default=40)
    parser.add_argument("--lines", type=int, default=16, help="of a gap")
    parser.add_argument("--most", type=int, default=512, help="tokens of a suggestion")
    parser.add_argument("--deadlines", type=int, nargs="+", default=[250, 1000], help="milliseconds")
    parser.add_argument("--free", action="store_true", help="no line ends a suggestion by being indented less")
    parser.add_argument(
        "--greedy", action="store_true", help="the likeliest token, and no infill sampler, which ends where it doubts"
    )
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    how = {"most": options.most, "seed": options.seed, "greedy": options.greedy}
    servers = dict(server.split("=", 1) for server in options.servers)
    files = sorted(
        path for path in options.code.rglob("*.py") if "test" not in str(path).lower() and "-packages" not in str(path)
    )
    found: dict[tuple[str, int], list[tuple[int, int, int, float, int]]] = defaultdict(list)
    for number, gap in enumerate(gaps(files, options.gaps, options.lines, options.seed, options.free)):
        order = list(servers)[number % len(servers) :] + list(servers)[: number % len(servers)]
        for name in order:
            ask(servers[name], gap, milliseconds=1, **how)
        for deadline in options.deadlines:
            for name in order:
                told = ask(servers[name], gap, milliseconds=deadline, **how)
                text, times = told["content"], told["timings"]
                right = common_prefix(list(text.encode()), list(gap.truth.encode()))
                drafted = times.get("draft_n_accepted", 0)
                found[name, deadline].append((len(text), times["predicted_n"], right, times["predicted_ms"], drafted))
    print("| deadline, ms | server | characters, mean | median | tokens, mean | tokens/s | from drafts | right, mean |")
    print("|---|---|---|---|---|---|---|---|")
    for deadline in options.deadlines:
        for name in servers:
            characters, tokens, right, times_ms, drafted = zip(*found[name, deadline], strict=True)
            speed = sum(tokens) / max(sum(times_ms), 1e-9) * 1000
            print(
                f"| {deadline} | {name} | {mean(characters):.1f} | {median(characters):g} | {mean(tokens):.1f} |"
                f" {speed:.1f} | {sum(drafted) / max(1, sum(tokens)):.0%} | {mean(right):.1f} |"
            )


if __name__ == "__main__":
    main()
