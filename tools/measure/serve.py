"""Servers under load, side by side: `python tools/measure/serve.py PROMPTS.jsonl NAME=URL...`

Asks every server the same, one after the other and in turns, so that what disturbs the machine disturbs all: tokens per
second of all clients together at 1, 2, 4, ... clients; the time to the first token of a second turn after a long one;
and what a streamed token takes beyond what the server says it took. Prints medians and the lowest and highest round.

PROMPTS holds a line of JSON for each prompt: {"messages": [...]}. Servers speak /v1/chat/completions; all are asked at
temperature 0, and without thinking where the template has that.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

PATH = "/v1/chat/completions"


def body(messages: Sequence[dict[str, str]], tokens: int, **more: Any) -> dict[str, Any]:
    return {"messages": messages, "max_tokens": tokens, "temperature": 0, "seed": 1, "model": "any", **more}


async def load(url: str, prompts: Sequence[Any], clients: int, tokens: int) -> tuple[float, float | None]:
    """Tokens per second of all clients together, each asking its share of the prompts; and the acceptance rate."""
    total = drafted = accepted = 0

    async def client(own: Sequence[Any]) -> None:
        nonlocal total, drafted, accepted
        for prompt in own:
            answer = (await http.post(PATH, json=body(prompt["messages"], tokens))).raise_for_status().json()
            total += answer["usage"]["completion_tokens"]
            drafted += answer.get("timings", {}).get("draft_n", 0)
            accepted += answer.get("timings", {}).get("draft_n_accepted", 0)

    async with httpx.AsyncClient(base_url=url, timeout=3600) as http:
        began = time.perf_counter()
        await asyncio.gather(*(client(prompts[i::clients]) for i in range(clients)))
        return total / (time.perf_counter() - began), accepted / drafted if drafted else None


async def stream(
    http: httpx.AsyncClient, messages: Sequence[Any], tokens: int
) -> tuple[float, float, str, dict[str, Any]]:
    """Seconds to the first text and to the end, the text, and the server's timings."""
    began, first, text, timings = time.perf_counter(), 0.0, "", {}
    async with http.stream("POST", PATH, json=body(messages, tokens, stream=True)) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line[6:])
            timings = chunk.get("timings", timings)
            piece = chunk["choices"][0]["delta"].get("content") if chunk["choices"] else None
            if piece:
                first = first or time.perf_counter() - began
                text += piece
    return first, time.perf_counter() - began, text, timings


async def two_turns(url: str, words: int, number: int) -> tuple[float, float]:
    """Seconds to the first token of a turn of so many words that nobody saw before, and of the turn after it."""
    long = " ".join(f"item{number}x{i}" if i % 7 == 0 else "and then the" for i in range(words))
    async with httpx.AsyncClient(base_url=url, timeout=3600) as http:
        messages = [{"role": "user", "content": f"Remember this: {long}. What is the first item?"}]
        first, _, text, _ = await stream(http, messages, 24)
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "And the last one?"}]
        return first, (await stream(http, messages, 8))[0]


async def overhead(url: str, messages: Sequence[Any], tokens: int) -> float:
    """Milliseconds a streamed token takes beyond what the server says."""
    async with httpx.AsyncClient(base_url=url, timeout=3600) as http:
        _, seconds, _, timings = await stream(http, messages, tokens)
    own = timings["prompt_ms"] + timings["predicted_ms"]
    return (1e3 * seconds - own) / timings["predicted_n"]


def show(what: str, found: dict[str, list[float]], unit: str) -> None:
    for name, values in found.items():
        spread = f"{min(values):.2f} to {max(values):.2f}"
        print(f"{what:24} {name:20} {statistics.median(values):9.2f} {unit} ({spread})", flush=True)


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts", type=Path)
    parser.add_argument("servers", nargs="+", metavar="NAME=URL")
    parser.add_argument("-n", type=int, default=64, help="tokens of an answer")
    parser.add_argument("--clients", type=int, nargs="*", default=[1, 2, 4, 8])
    parser.add_argument("--count", type=int, default=8, help="prompts of a round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--turn", type=int, default=0, metavar="WORDS", help="measure a turn of so many, and the next")
    parser.add_argument("--overhead", action="store_true", help="measure what streaming costs a token")
    options = parser.parse_args()
    servers = dict(server.split("=", 1) for server in options.servers)
    prompts = [json.loads(line) for line in options.prompts.read_text("utf-8").splitlines()][: options.count]
    for clients in options.clients:
        speeds: dict[str, list[float]] = {name: [] for name in servers}
        rates: dict[str, float | None] = {}
        for number in range(options.rounds + 1):
            for name in sorted(servers, reverse=number % 2 == 1):
                speed, rates[name] = await load(servers[name], prompts, clients, options.n)
                # The first round fills the prompt caches.
                speeds[name] += [speed] if number else []
        show(f"{clients} clients", speeds, "tokens/s")
        print(" " * 24, ", ".join(f"{name} accepted {rate:.0%}" for name, rate in rates.items() if rate is not None))
    if options.turn:
        turns = {
            name: [await two_turns(url, options.turn, i) for i in range(options.rounds)]
            for name, url in servers.items()
        }
        for number, what in enumerate(("first turn", "second turn")):
            waits = {name: [pair[number] for pair in pairs] for name, pairs in turns.items()}
            show(what, waits, "s to its first token")
    if options.overhead:
        messages = prompts[0]["messages"]
        costs = {
            name: [await overhead(url, messages, 200) for _ in range(options.rounds)] for name, url in servers.items()
        }
        show("a streamed token", costs, "ms beyond its pass")


if __name__ == "__main__":
    asyncio.run(main())
