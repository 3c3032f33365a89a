"""A server with hostile clients: `python tools/measure/fuzz.py --model MODEL --seconds 600`.

Four clients send short requests in a loop while other processes send hostile ones. Reports the status codes, the
longest time that a client waited, the memory, files and children of the server, and the time to end after SIGTERM.
`--replay KIND:INDEX` sends one hostile request again to a running server. Exits with 1 after findings.
"""

from __future__ import annotations

import argparse
import http.client
import multiprocessing
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import cycle, islice
from pathlib import Path
from queue import Empty
from statistics import median, quantiles
from typing import Any

import psutil
from hostile.clients import CLIENTS, MAX_SHOWN, PATIENCE, attack_server, make_attack, send, serve_clients

COMMAND = [sys.executable, "-m", "ngramspec_cli.app"]
DEMO = Path(__file__).parents[2] / "ngramspec" / "demo" / "demo.gguf"
MAX_WAIT_SECONDS = 1.0  # seconds without service that are a finding
_CONTEXT = multiprocessing.get_context("fork")


# --------------------------------------------------------------------------- the server


@contextmanager
def run_server(options: argparse.Namespace, log: Path) -> Iterator[subprocess.Popen[bytes] | None]:
    """Start a server and wait until it is ready; None if it ends before."""
    model = [*COMMAND, "serve", options.model, "--port", str(options.port), "-np", str(options.parallel)]
    with log.open("wb") as file:
        process = subprocess.Popen([*model, "--metrics", *options.options.split()], stdout=file, stderr=file)
    try:
        while process.poll() is None and get_status(options.port, "/health") != 200:
            time.sleep(0.1)
        yield process if process.poll() is None else None
    finally:
        process.kill()
        process.wait()


def get_status(port: int, path: str) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=2)
    with suppress(OSError, http.client.HTTPException):
        connection.request("GET", path)
        return connection.getresponse().status
    return 0


def count_active_requests(port: int) -> int:
    """Return the number of running and waiting requests of the engine."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    connection.request("GET", "/metrics")
    lines = connection.getresponse().read().decode().splitlines()
    names = ("llamacpp:requests_processing ", "llamacpp:requests_deferred ")
    return sum(int(float(line.rpartition(" ")[2])) for line in lines if line.startswith(names))


class Campaign:
    """One server under attack, and the findings."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.findings: list[str] = []
        self.statuses: dict[str, Counter[str]] = defaultdict(Counter)
        self.open: dict[int, tuple[str, float]] = {}
        self.attacks: list[tuple[str, int, float, float]] = []
        self.samples: list[tuple[int, int, int, int]] = []
        self.waits: list[tuple[str, float, float, int]] = []
        self.alone: list[tuple[str, float, float, int]] = []  # waits before the attack
        self.attacked = 0.0  # start of the attack
        self.ending = False  # True after SIGTERM

    def find(self, text: str) -> None:
        self.findings.append(text)
        print(f"FINDING (seed {self.options.seed}) {text}", flush=True)

    def drain(self, events: Any) -> None:
        """Record the events of the hostile clients."""
        while not events.empty():
            kind, index, start, end, status, response = events.get()
            if end is None:
                self.open[index] = kind, start
                continue
            self.open.pop(index, None)
            self.attacks.append((kind, index, start, end))
            if not self.ending:
                self.statuses[kind][status] += 1
            is_failure = status[:1] == "5" and status[:3] not in ("501", "503") and "image input" not in str(response)
            if status.endswith("500 in stream") or is_failure:
                self.find(f"{kind}:{index} {status} after {end - start:.1f} s: {response[-400:]!r}")

    def sample(self, process: psutil.Process) -> None:
        """Record the memory, files, threads and children of the server."""
        with suppress(psutil.Error):
            children = process.children(recursive=True)
            memory = process.memory_info().rss
            self.samples.append((memory, process.num_fds(), process.num_threads(), len(children)))

    def run(self, log: Path) -> None:
        """Attack a new server."""
        port, results, events = self.options.port, _CONTEXT.Queue(), _CONTEXT.Queue()
        with run_server(self.options, log) as process:
            if process is None:
                self.find("the server did not start: " + log.read_text()[-MAX_SHOWN:])
                return
            server_process, stop, go = psutil.Process(process.pid), _CONTEXT.Event(), _CONTEXT.Event()
            attack = (port, self.options.seed, _CONTEXT.Value("q", self.options.first), go, events)
            helper = _CONTEXT.Process(target=serve_clients, args=(port, stop, results))
            kinds = islice(cycle(self.options.kinds.split(",")), self.options.enemies)
            enemies = [_CONTEXT.Process(target=attack_server, args=(kind, *attack)) for kind in kinds]
            for client in (helper, *enemies):
                client.daemon = True
                client.start()
            time.sleep(self.options.alone)
            self.attacked = time.monotonic()
            go.set()
            while time.monotonic() < self.attacked + self.options.seconds and process.poll() is None:
                self.sample(server_process)
                self.drain(events)
                time.sleep(0.25)
            go.clear()
            stop.set()
            with suppress(Empty):
                waits = results.get(timeout=PATIENCE + 5)
                self.alone += [wait for wait in waits if wait[1] < self.attacked]
                self.waits += [wait for wait in waits if wait[1] >= self.attacked]
            if process.poll() is None:
                self.rest(server_process, events)
                self.ending = True
                go.set()
                time.sleep(2)
                self.end(process, server_process)
            else:
                self.find(f"the server ended with code {process.returncode}; open: {self.open}")
            for enemy in enemies:
                enemy.terminate()
            self.drain(events)
        self.read_log(log)

    def rest(self, server_process: psutil.Process, events: Any) -> None:
        """Wait until the last requests have ended; find those that the server still works on after their clients."""
        end = time.monotonic() + 2 * PATIENCE
        while time.monotonic() < end and (self.open or count_active_requests(self.options.port)):
            self.drain(events)
            time.sleep(0.25)
        if n_active := count_active_requests(self.options.port):
            self.find(f"{n_active} requests are at work after their clients left; open: {self.open}")
        time.sleep(2)
        self.sample(server_process)

    def end(self, process: subprocess.Popen[bytes], server_process: psutil.Process) -> None:
        """Send SIGTERM to the server, which is still under attack, and wait for its end."""
        if process.poll() is not None:
            return
        children = server_process.children(recursive=True)
        start = time.monotonic()
        process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(20)
        seconds = time.monotonic() - start
        print(f"ended {seconds:.1f} s after SIGTERM with code {process.returncode}", flush=True)
        if seconds > 13 or process.returncode != 0:
            self.find(f"ended {seconds:.1f} s after SIGTERM with code {process.returncode}; open: {self.open}")
        time.sleep(1)
        for child in children:
            with suppress(psutil.Error):
                if child.is_running() and child.status() != psutil.STATUS_ZOMBIE:
                    self.find(f"child {child.pid} is left: {' '.join(child.cmdline())}")

    def read_log(self, log: Path) -> None:
        """Record exceptions in the log as findings: their last frames and messages."""
        if self.options.log is not None:
            shutil.copyfile(log, self.options.log)
        lines = log.read_text(errors="replace").splitlines()
        for at, line in enumerate(lines):
            if line.startswith("Traceback"):
                end = next((i for i in range(at + 1, len(lines)) if not lines[i].startswith(" ")), len(lines))
                self.find("log: " + "\n".join(lines[max(at, end - 8) : end + 1]))
            elif "the engine failed" in line or "never awaited" in line:
                self.find(f"log: {line}")

    def report(self) -> None:
        """Print the figures, and record waits and growth of memory as findings."""
        for kind, counts in self.statuses.items():
            print(f"{kind}: {counts.total()} requests;", ", ".join(f"{n} {s}" for s, n in sorted(counts.items())))
        for name in CLIENTS:
            waits = [(end - begin, begin, end) for client, begin, end, _ in self.waits if client == name]
            alone = max((end - begin for client, begin, end, _ in self.alone if client == name), default=0.0)
            codes = Counter(status for client, _, _, status in self.waits if client == name)
            times = [seconds for seconds, _, _ in waits] or [0.0, 0.0]
            figures = f"median {median(times) * 1000:.1f} ms, p99 {quantiles(times, n=100)[98] * 1000:.0f} ms"
            print(f"{name}: {len(waits)} waits, {figures}, longest {max(times):.2f} s; status {dict(codes)}", end="")
            print(f"; longest before the attack {alone:.2f} s" if self.options.alone else "")
            for seconds, begin, end in sorted(waits, reverse=True)[:5]:
                if seconds > MAX_WAIT_SECONDS:
                    requests = [(b, k, i) for k, i, b, e in self.attacks if b < end and e > begin]
                    requests += [(b, k, i) for i, (k, b) in self.open.items() if b < end]
                    requests.sort(key=lambda item: abs(item[0] - begin))
                    near = " ".join(f"{k}:{i}({b - begin:+.1f})" for b, k, i in requests[:10])
                    self.find(f"{name} waited {seconds:.2f} s; requests that ran, and their starts: {near}")
        if self.samples:
            memory = [rss // 2**20 for rss, *_ in self.samples]
            quarter = max(1, len(memory) // 4)
            print(f"MiB of memory: {memory[0]} at the start, {max(memory)} at most, {memory[-1]} at the end;", end=" ")
            print(*memory[:: max(1, len(memory) // 10)])
            for name, at in (("files", 1), ("threads", 2), ("children", 3)):
                values = [sample[at] for sample in self.samples]
                print(f"{name}: {values[0]} at the start, {max(values)} at most, {values[-1]} at the end")
            if max(memory[-quarter:]) > 1.1 * max(memory[quarter:-quarter] or memory):
                self.find("memory did not level off")


def replay(options: argparse.Namespace) -> None:
    """Send one hostile request again, and print the response."""
    kind, _, index = options.replay.partition(":")
    attack = make_attack(kind, int(index), options.seed)
    steps = [step if len(repr(step)) < MAX_SHOWN else repr(step)[:MAX_SHOWN] + "..." for step in attack.steps[:5]]
    print(attack.reading, attack.connections, "connections:", *steps, sep="\n")
    began = time.monotonic()
    status, response = send(attack, options.port)
    print(f"{status} after {time.monotonic() - began:.2f} s: {response.decode('utf-8', 'replace')}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replay", metavar="KIND:INDEX", help="send this request to a running server")
    parser.add_argument("--model", default=str(DEMO))
    parser.add_argument("--port", type=int, default=8781)
    parser.add_argument("--parallel", type=int, default=16, help="slots; more than hostile clients can use at once")
    parser.add_argument("--enemies", type=int, default=5, help="processes that send hostile requests, of one kind each")
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--alone", type=float, default=5, help="seconds before the attack")
    parser.add_argument("--log", help="file for the log of the server")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="index of the first hostile request")
    parser.add_argument("--kinds", default="mutated,extreme,http,grammar,variables", help="kinds of hostile requests")
    parser.add_argument("--options", default="", help="further options of ngramspec serve, in one string")
    options = parser.parse_args()
    if options.replay:
        replay(options)
        return 0
    campaign = Campaign(options)
    with tempfile.TemporaryDirectory() as folder:
        campaign.run(Path(folder) / "log")
    campaign.report()
    print(f"{len(campaign.findings)} findings")
    return int(bool(campaign.findings))


if __name__ == "__main__":
    sys.exit(main())
