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
class Totals:
    """Counts and errors of the test."""

    n_complete: int = 0
    n_aborted: int = 0
    n_tokens: int = 0
    n_unknown_tokens: int = 0
    n_cached: int = 0
    errors: list[str] = field(default_factory=list)
    memory_samples: list[int] = field(default_factory=list)


def make_requests(seed: int, count: int) -> list[dict[str, Any]]:
    """Return greedy and sampled requests of various lengths, some of which have a common prefix."""
    chance = random.Random(seed)
    bodies = []
    for number in range(count):
        subject = chance.choice(SUBJECTS)
        text = f"Write about {subject}. " + f"Mind point {number % 5}, and the rest. " * chance.choice((0, 1, 5, 40))
        sampling = {"temperature": 0.8, "seed": number} if number % 2 else {"temperature": 0}
        bodies.append({"prompt": text, "max_tokens": chance.choice((1, 5, 20, 60)), "model": "any", **sampling})
    return bodies


async def complete(http: httpx.AsyncClient, body: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    answer = (await http.post("/v1/completions", json=body)).raise_for_status().json()
    return answer["choices"][0]["text"], answer["usage"]


async def read_part(http: httpx.AsyncClient, body: dict[str, Any], chunks: int) -> str:
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


async def read_counter(http: httpx.AsyncClient, name: str) -> float:
    lines = (await http.get("/metrics")).raise_for_status().text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"llamacpp:{name} "))


async def run_client(
    http: httpx.AsyncClient, bodies: list[Any], alone: list[str], totals: Totals, chance: random.Random
) -> None:
    """Send one random request and record its result."""
    number = chance.randrange(len(bodies))
    body = bodies[number]
    if chance.random() < 0.25:
        text = await read_part(http, body, chance.randrange(0, 20))
        totals.n_aborted += 1
        totals.n_unknown_tokens += body["max_tokens"]
        if not alone[number].startswith(text):
            totals.errors.append(f"part of request {number}: {text!r} does not begin {alone[number]!r}")
        return
    text, usage = await complete(http, body)
    totals.n_complete += 1
    totals.n_tokens += usage["completion_tokens"]
    totals.n_cached += usage["prompt_tokens_details"]["cached_tokens"]
    if text != alone[number]:
        totals.errors.append(f"request {number}: {text!r} is not {alone[number]!r}")


async def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--requests", type=int, help="end after so many, in place of a time")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--kinds", type=int, default=40, help="different requests")
    parser.add_argument("--pid", type=int, help="of the server, whose memory is watched")
    options = parser.parse_args()
    bodies, totals = make_requests(1, options.kinds), Totals()
    server = psutil.Process(options.pid) if options.pid else None
    limits = httpx.Limits(max_connections=4 * options.clients)
    async with httpx.AsyncClient(base_url=options.url, timeout=600, limits=limits) as http:
        alone = [(await complete(http, body))[0] for body in bodies]
        before, began, count = await read_counter(http, "tokens_predicted_total"), time.perf_counter(), 0

        def is_finished() -> bool:
            return count >= options.requests if options.requests else time.perf_counter() - began > options.seconds

        async def clients(number: int) -> None:
            nonlocal count
            chance = random.Random(number)
            while not is_finished():
                count += 1
                await run_client(http, bodies, alone, totals, chance)
                if server is not None and count % 50 == 0:
                    totals.memory_samples.append(server.memory_info().rss)

        await asyncio.gather(*(clients(number) for number in range(options.clients)))
        for _ in range(100):
            if not await read_counter(http, "requests_processing"):
                break
            await asyncio.sleep(0.1)
        else:
            totals.errors.append("requests are still at work long after the last one")
        n_counted = await read_counter(http, "tokens_predicted_total") - before
    max_tokens = totals.n_tokens + totals.n_unknown_tokens
    if not totals.n_tokens <= n_counted <= max_tokens:
        totals.errors.append(f"{n_counted:.0f} tokens were counted, not {totals.n_tokens} to {max_tokens}")
    samples = totals.memory_samples
    third = len(samples) // 3
    if third and max(samples[-third:]) > 1.1 * max(samples[third : 2 * third]):
        totals.errors.append(f"memory grew from {samples[third]} to {samples[-1]} bytes")
    print(f"{totals.n_complete} whole answers, {totals.n_aborted} clients hung up,", end=" ")
    print(f"{totals.n_tokens} tokens in whole answers,", end=" ")
    print(f"{n_counted:.0f} in all, {totals.n_cached} tokens of prompts from the cache; {len(totals.errors)} wrong")
    if samples:
        print("MiB of memory:", ", ".join(f"{rss / 2**20:.0f}" for rss in samples[:: max(1, len(samples) // 12)]))
    print(*totals.errors[:10], sep="\n", file=sys.stderr)
    return int(bool(totals.errors))


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
