"""Test a server with clients that connect and disconnect.

    python tools/measure/soak.py http://127.0.0.1:8080 --pid PID

Start the server with --exact on --metrics. The script first sends every request alone. Then clients send random
requests at the same time, some with streaming, and some clients disconnect before the end. Every complete answer must
equal the answer to the same request alone, and every incomplete one must be its prefix. The counters of /metrics must
add up, no request may be running at the end, and the memory of PID must not grow.

The script prints its counts and exits with 1 after an error.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from dataclasses import dataclass, field
from typing import Any

import httpx
import psutil

SUBJECTS = ("a cat", "the sea", "Rust code", "JSON", "a recipe", "1, 2, 3", "a poem", "the same again", "")


@dataclass
class Seen:
    """Counts and errors of the test."""

    whole: int = 0
    left: int = 0
    tokens: int = 0
    unknown: int = 0
    cached: int = 0
    wrong: list[str] = field(default_factory=list)
    memory: list[int] = field(default_factory=list)


def requests(seed: int, count: int) -> list[dict[str, Any]]:
    """Return greedy and sampled requests of various lengths, some of which have a common prefix."""
    chance = random.Random(seed)
    made = []
    for number in range(count):
        subject = chance.choice(SUBJECTS)
        text = f"Write about {subject}. " + f"Mind point {number % 5}, and the rest. " * chance.choice((0, 1, 5, 40))
        sampled = {"temperature": 0.8, "seed": number} if number % 2 else {"temperature": 0}
        made.append({"prompt": text, "max_tokens": chance.choice((1, 5, 20, 60)), "model": "any", **sampled})
    return made


async def whole(http: httpx.AsyncClient, body: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    answer = (await http.post("/v1/completions", json=body)).raise_for_status().json()
    return answer["choices"][0]["text"], answer["usage"]


async def part(http: httpx.AsyncClient, body: dict[str, Any], chunks: int) -> str:
    """Return the text of the first chunks and disconnect."""
    text = ""
    async with http.stream("POST", "/v1/completions", json=body | {"stream": True}) as answer:
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                chunk = json.loads(line[6:])
                text += chunk["choices"][0]["text"] if chunk["choices"] else ""
                chunks -= 1
            if chunks <= 0:
                break
    return text


async def counter(http: httpx.AsyncClient, name: str) -> float:
    lines = (await http.get("/metrics")).raise_for_status().text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"llamacpp:{name} "))


async def client(
    http: httpx.AsyncClient, asked: list[Any], alone: list[str], seen: Seen, chance: random.Random
) -> None:
    """Send one random request and record its result."""
    number = chance.randrange(len(asked))
    body = asked[number]
    if chance.random() < 0.25:
        text = await part(http, body, chance.randrange(0, 20))
        seen.left += 1
        seen.unknown += body["max_tokens"]
        if not alone[number].startswith(text):
            seen.wrong.append(f"part of request {number}: {text!r} does not begin {alone[number]!r}")
        return
    text, usage = await whole(http, body)
    seen.whole += 1
    seen.tokens += usage["completion_tokens"]
    seen.cached += usage["prompt_tokens_details"]["cached_tokens"]
    if text != alone[number]:
        seen.wrong.append(f"request {number}: {text!r} is not {alone[number]!r}")


async def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--requests", type=int, help="end after so many, in place of a time")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--kinds", type=int, default=40, help="different requests")
    parser.add_argument("--pid", type=int, help="of the server, whose memory is watched")
    options = parser.parse_args()
    asked, seen = requests(1, options.kinds), Seen()
    server = psutil.Process(options.pid) if options.pid else None
    limits = httpx.Limits(max_connections=4 * options.clients)
    async with httpx.AsyncClient(base_url=options.url, timeout=600, limits=limits) as http:
        alone = [(await whole(http, body))[0] for body in asked]
        before, began, count = await counter(http, "tokens_predicted_total"), time.perf_counter(), 0

        def ended() -> bool:
            return count >= options.requests if options.requests else time.perf_counter() - began > options.seconds

        async def clients(number: int) -> None:
            nonlocal count
            chance = random.Random(number)
            while not ended():
                count += 1
                await client(http, asked, alone, seen, chance)
                if server is not None and count % 50 == 0:
                    seen.memory.append(server.memory_info().rss)

        await asyncio.gather(*(clients(number) for number in range(options.clients)))
        for _ in range(100):
            if not await counter(http, "requests_processing"):
                break
            await asyncio.sleep(0.1)
        else:
            seen.wrong.append("requests are still at work long after the last one")
        made = await counter(http, "tokens_predicted_total") - before
    if not seen.tokens <= made <= seen.tokens + seen.unknown:
        seen.wrong.append(f"{made:.0f} tokens were counted, not {seen.tokens} to {seen.tokens + seen.unknown}")
    third = len(seen.memory) // 3
    if third and max(seen.memory[-third:]) > 1.1 * max(seen.memory[third : 2 * third]):
        seen.wrong.append(f"memory grew from {seen.memory[third]} to {seen.memory[-1]} bytes")
    print(f"{seen.whole} whole answers, {seen.left} clients hung up, {seen.tokens} tokens in whole answers,", end=" ")
    print(f"{made:.0f} in all, {seen.cached} tokens of prompts from the cache; {len(seen.wrong)} wrong")
    if seen.memory:
        print(
            "MiB of memory:", ", ".join(f"{rss / 2**20:.0f}" for rss in seen.memory[:: max(1, len(seen.memory) // 12)])
        )
    print(*seen.wrong[:10], sep="\n", file=sys.stderr)
    return int(bool(seen.wrong))


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
