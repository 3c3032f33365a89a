"""Measure and model decoding with layers on other machines by network delay, with and without drafts.

The script starts workers on this machine. A proxy in front of each worker delays every byte by half of the requested
round-trip time in each direction. The script continues a prompt of each kind with and without drafts, in turn. The
modelled time of a pass is its time without a delay, by its size, plus the delay for each wait for a worker. The proxies
count these waits. All processes share the cores of this machine, so decoding is slower than in one process even without
a delay.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing as mp
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

MAX_START_SECONDS = 15.0
"""Maximum time in seconds until a worker listens."""


class Network(NamedTuple):
    """Simulated network.

    Attributes:
        delay: Delay in seconds in each direction.
        rate: Rate in bytes per second in each direction.
        trips: Shared counter of the waits for an answer.
        n_sent_bytes: Shared counter of the bytes sent to workers.
    """

    delay: float
    rate: float
    trips: Any
    n_sent_bytes: Any


def forward(
    source: socket.socket, sink: socket.socket, network: Network, is_waiting: threading.Event, *, back: bool
) -> None:
    """Forward bytes with the delay of the network; `back` is True in the direction of the client."""
    queue: SimpleQueue[tuple[float, bytes]] = SimpleQueue()

    def release() -> None:
        while True:
            due, data = queue.get()
            time.sleep(max(0.0, due - time.perf_counter()))
            with suppress(OSError):  # the other side has closed the connection
                sink.sendall(data) if data else sink.shutdown(socket.SHUT_WR)
            if not data:
                return

    threading.Thread(target=release, daemon=True).start()
    free_at = 0.0
    while True:
        try:
            data = source.recv(1 << 20)
        except OSError:
            data = b""
        free_at = max(free_at, time.perf_counter()) + len(data) / network.rate
        queue.put((free_at + network.delay, data))
        if not data:
            return
        if not back:
            is_waiting.set()
            with network.n_sent_bytes.get_lock():
                network.n_sent_bytes.value += len(data)
        elif is_waiting.is_set():
            is_waiting.clear()
            with network.trips.get_lock():
                network.trips.value += 1


def run_proxy(listener: socket.socket, worker: int, network: Network) -> None:
    """Accept connections to a worker and forward them through the simulated network."""
    while True:
        client, _ = listener.accept()
        server = socket.create_connection(("127.0.0.1", worker))
        for end in (client, server):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        is_waiting = threading.Event()
        for ends, back in (((client, server), False), ((server, client), True)):
            threading.Thread(
                target=forward, args=(*ends, network, is_waiting), kwargs={"back": back}, daemon=True
            ).start()


def run_proxies(workers: Sequence[int], network: Network, ports: Any) -> None:
    """Run the proxies of all workers until the process is terminated, and put their ports into `ports`."""
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in workers]
    for listener, worker in zip(listeners, workers, strict=True):
        threading.Thread(target=run_proxy, args=(listener, worker, network), daemon=True).start()
    ports.put([listener.getsockname()[1] for listener in listeners])
    threading.Event().wait()


def measure(model: Path, ports: Sequence[int], tokens: int, n_ctx: int, network: Network, results: Any) -> None:
    """Decode with these workers, and put the passes, seconds and costs of passes into `results`."""
    from ngramspec.decoding.decoder import SpeculativeDecoder
    from ngramspec.instruments.prompts import load_prompts, prepare
    from ngramspec.llama import rpc
    from ngramspec.llama.target import Target

    rpc.connect([f"127.0.0.1:{port}" for port in ports])
    prompts = {prompt.category: prompt for prompt in reversed(load_prompts(None))}
    result: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder, Target(model, ctx_size=n_ctx, threads=1, exact="off") as target:
        cases, _ = prepare(target.vocabulary, prompts.values(), tokens, target.n_ctx)
        decoders = {
            name: SpeculativeDecoder(target, drafter=drafter, exact="off", calibration_folder=Path(folder))
            for name, drafter in (("plain", None), ("drafted", "mixture"))
        }
        for decoder in (decoders["drafted"], decoders["plain"]):
            list(decoder.generate(cases[0].tokens, max_tokens=32))
        for name in decoders:
            result[name] = {"seconds": 0.0, "tokens": 0, "trips": 0, "sent": 0, "batches": [], "texts": []}
        for i, case in enumerate(cases):
            for name in sorted(decoders, reverse=i % 2 == 0):
                steps = decoders[name].generate(case.tokens, max_tokens=tokens)
                text = list(next(steps).tokens)
                trips, n_sent_bytes, began = network.trips.value, network.n_sent_bytes.value, time.perf_counter()
                for step in steps:
                    result[name]["batches"].append(step.batch)
                    text += step.tokens
                result[name]["seconds"] += time.perf_counter() - began
                result[name]["trips"] += network.trips.value - trips
                result[name]["sent"] += network.n_sent_bytes.value - n_sent_bytes
                result[name]["tokens"] += len(text) - 1
                result[name]["texts"].append(text)
        times = decoders["drafted"].times
        result["ratios"] = [times.ratio(n) for n in range(1, 65)]
        result["switch"] = times.change
    results.put(result)


def model_speed(run: dict[str, Any], without: dict[str, Any], delay: float) -> float:
    """Return the modelled tokens per second of a run from the times of passes without a delay."""
    single = without["plain"]["seconds"] / len(without["plain"]["batches"])
    seconds, last = 0.0, 1
    for batch in run["batches"]:
        seconds += single * without["ratios"][min(batch, 64) - 1] + (without["switch"] if batch != last else 0.0)
        last = batch
    return float(run["tokens"] / (seconds + delay * run["trips"]))


def wait_for(port: int) -> None:
    deadline = time.monotonic() + MAX_START_SECONDS
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--delays", default="0,1,5,20", help="round trips added, in milliseconds; 0 among them")
    parser.add_argument("--mbit", type=float, default=math.inf, help="megabits a second that each connection carries")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("-n", type=int, default=150, help="tokens after each prompt")
    parser.add_argument("-c", type=int, default=2048, help="context in tokens; longer prompts are left out")
    parser.add_argument("-t", type=int, default=1, help="threads of each worker")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    delays = sorted({0.0, *(float(d) / 1000 for d in options.delays.split(","))})
    free = [socket.create_server(("127.0.0.1", 0)) for _ in range(options.workers)]
    ports = [listener.getsockname()[1] for listener in free]
    for listener in free:
        listener.close()
    command = [sys.executable, "-m", "ngramspec_cli.app", "rpc-worker", "-t", str(options.t), "--port"]
    workers = [subprocess.Popen([*command, str(port)], stderr=subprocess.DEVNULL) for port in ports]
    context = mp.get_context("spawn")
    results: dict[float, dict[str, Any]] = {}
    try:
        for port in ports:
            wait_for(port)
        print(
            "round trip +ms | plain tok/s (modelled) | drafted tok/s (modelled) | gain | tokens/pass | waits/pass"
            " | KB sent/pass | change of size"
        )
        for delay in delays:
            network = Network(delay / 2, options.mbit * 1e6 / 8, context.Value("q", 0), context.Value("q", 0))
            port_queue, result_queue = context.Queue(), context.Queue()
            between = context.Process(target=run_proxies, args=(ports, network, port_queue), daemon=True)
            between.start()
            child = context.Process(
                target=measure,
                args=(options.model, port_queue.get(), options.n, options.c, network, result_queue),
                daemon=True,
            )
            child.start()
            while result_queue.empty() and child.is_alive():
                time.sleep(0.1)
            run = results[delay] = result_queue.get(timeout=1)
            child.join()
            between.terminate()
            plain, drafts = run["plain"], run["drafted"]
            speed = {name: run[name]["tokens"] / run[name]["seconds"] for name in ("plain", "drafted")}
            model = {name: model_speed(run[name], results[0.0], delay) for name in speed}

            def each(count: str, unit: float, run: dict[str, Any] = run) -> str:
                shares = (run[name][count] / unit / len(run[name]["batches"]) for name in ("plain", "drafted"))
                return "{:.1f}, {:.1f} drafted".format(*shares)

            assert plain["texts"] == results[0.0]["plain"]["texts"]
            same = sum(a == b for a, b in zip(plain["texts"], drafts["texts"], strict=True))
            print(
                f"{delay * 1e3:g} | {speed['plain']:.1f} ({model['plain']:.1f}) | {speed['drafted']:.1f}"
                f" ({model['drafted']:.1f}) | {speed['drafted'] / speed['plain']:.2f} |"
                f" {drafts['tokens'] / len(drafts['batches']):.2f} | {each('trips', 1)} | {each('sent', 1e3)} |"
                f" {run['switch'] * 1e3:.2f} ms; {same} of {len(plain['texts'])} texts alike",
                flush=True,
            )
    finally:
        for worker in workers:
            worker.terminate()
    if options.json is not None:
        options.json.write_text(json.dumps({str(d): r for d, r in results.items()}, indent=1))


if __name__ == "__main__":
    main()
