"""simonw's `llm`, set up as for any server of OpenAI's kind: answers, streams, a conversation that goes on."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.fake_service import Script
from support.http import scripted
from support.scripted_server import listening

from ngramspec.server.app import make_app

pytest.importorskip("llm")

TEXT = "Hello, world"


def llm(home: Path, *arguments: str) -> str:
    environment = {**os.environ, "LLM_USER_PATH": str(home), "OPENAI_API_KEY": "any"}
    done = subprocess.run(
        [sys.executable, "-m", "llm", *arguments],
        check=False,
        capture_output=True,
        text=True,
        env=environment,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("more", [(), ("--no-stream",)])
def test_it_chats(tmp_path: Path, more: tuple[str, ...]) -> None:
    server, service = scripted(Script(TEXT))
    with listening(make_app(server)) as address:
        (tmp_path / "extra-openai-models.yaml").write_text(
            f"- model_id: local\n  model_name: any\n  api_base: {address}/v1\n"
        )
        assert llm(tmp_path, "-m", "local", *more, "-s", "Be kind.", "Hi").strip() == TEXT
        assert llm(tmp_path, "-m", "local", *more, "-c", "And now?").strip() == TEXT
        first, second = service.requests
    assert len(second.prompt) > len(first.prompt)
