"""`ngramspec serve` under clients that come and go: what `tools/measure/soak.py` does for minutes, in short."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_answers_are_those_given_alone_and_counters_add_up() -> None:
    command = [sys.executable, "-m", "ngramspec_cli.app", "serve", str(ROOT / "ngramspec/demo/demo.gguf")]
    options = ["-c", "768", "-t", "1", "-np", "3", "--exact", "on", "--port", "0", "--cache-ram", "4"]
    with subprocess.Popen([*command, *options], stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        address = ""
        for line in server.stderr:
            if line.startswith("listening on "):
                address = line.split()[-1]
            if " is ready: " in line:
                break
        assert address
        soak = [sys.executable, str(ROOT / "tools/measure/soak.py"), address, "--requests", "150", "--clients", "6"]
        done = subprocess.run(
            [*soak, "--kinds", "20", "--pid", str(server.pid)],
            check=False,
            capture_output=True,
            text=True,
            timeout=300,
        )
        server.send_signal(signal.SIGTERM)
        server.stderr.read()
        assert server.wait(60) == 0
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 wrong" in done.stdout
    assert " 0 clients hung up" not in done.stdout
