"""Compare the table in `tests/support/schema_keywords.py` with llama-server's support of JSON schema keywords.

    python tools/schemas.py --model FILE.gguf --llama-server PROGRAM

llama-server returns the grammar that it creates from a schema, and llama.cpp's own grammar sampler reads the examples.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from support.llama_chain import read_with_llama
from support.model_files import write_words
from support.schema_keywords import KEYWORDS

from ngramspec.llama.vocabulary import Vocabulary

URL = "http://127.0.0.1:18099"


@contextmanager
def run_llama_server(program: str, model: str) -> Iterator[None]:
    command = [program, "-m", model, "--port", str(httpx.URL(URL).port), "-c", "512", "-t", "1"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for _ in range(300):
            try:
                httpx.get(f"{URL}/health")
                break
            except httpx.HTTPError:
                time.sleep(0.1)
        yield
    finally:
        process.kill()
        process.wait()


def fetch_grammar(schema: Mapping[str, Any]) -> str | None:
    """Return the grammar that llama-server creates from a schema; `None` if llama-server rejects the schema."""
    body = {"prompt": "x", "n_predict": 1, "json_schema": schema}
    response = httpx.post(f"{URL}/completion", json=body, timeout=30)
    return str(response.json()["generation_settings"]["grammar"]) if response.is_success else None


def check_example(vocabulary: Vocabulary, schema: Mapping[str, Any], good: str, bad: str) -> str:
    """Return what llama-server does with a schema, given a text that matches it and one that does not."""
    text = fetch_grammar(schema)
    if text is None:
        return "refused"
    if not text:  # without a grammar, the response can be any text
        return "drops the schema"
    outcomes = [read_with_llama(vocabulary, text, example.encode()) for example in (good, bad)]
    if outcomes[0] is None or outcomes[1] is None:
        return "refused"
    return "too strict" if not outcomes[0][1] else "ignored" if outcomes[1][1] else "kept"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="GGUF file for llama-server")
    parser.add_argument("--llama-server", required=True, metavar="PROGRAM")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, run_llama_server(options.llama_server, options.model):
        vocabulary = Vocabulary(write_words(Path(folder) / "bytes.gguf", []))
        for keyword, (table_value, _, examples) in KEYWORDS.items():
            results = [check_example(vocabulary, *example) for example in examples]
            worst = min(results, key=("refused", "drops the schema", "ignored", "too strict", "kept").index)
            print(f"{'ok ' if worst == table_value else '!! '} {keyword}: {worst}, in the table {table_value}")


if __name__ == "__main__":
    main()
