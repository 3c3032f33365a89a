"""Compare the JSON schemas of ngramspec and llama-server: compilation, validity of the texts, and times.

    python tools/schemas.py --model FILE.gguf [--count 2000] [--llama-server PROGRAM] [--keywords]

The schemas are random combinations of keywords (`tests/support/json_texts.py`). Three texts of each are drawn byte by
byte from the bytes that the grammar allows, and the package jsonschema validates them. A mask covers all tokens of the
model; it is computed before each token of such a text. llama-server returns the grammar that it creates from a schema.
llama.cpp's own grammar sampler, which llama-server uses, then draws the texts and computes the masks. `--keywords`
compares the table in `tests/support/schema_keywords.py` with the behaviour of this llama-server.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import random
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import llama_cpp.llama_cpp as llama
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from support.json_texts import is_valid, random_text, whole_schema
from support.llama_grammar import FIRST_BYTE, read_with_llama
from support.schema_keywords import KEYWORDS
from support.vocabulary_files import END, write_words

from ngramspec.errors import GrammarError
from ngramspec.grammars.json_schema import schema_grammar
from ngramspec.llama.vocabulary import Vocabulary
from ngramspec.sampling.rows import CANDIDATE

N_TEXTS = 3  # number of texts drawn per schema
MAX_MASKS = 4  # number of tokens with a mask per text for llama.cpp, whose masks take milliseconds each
PORT = 18099


class Result:
    """Measurements of one program."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.counts = Counter[str]()
        self.compiling: list[float] = []  # compilation times in seconds
        self.masks: list[float] = []  # times of masks in seconds
        self.reasons = Counter[str]()

    def count_text(self, schema: Mapping[str, Any], text: str | None) -> None:
        if text is None:
            self.counts["endless"] += 1
            return
        try:
            valid = is_valid(schema, text)
        except (ValueError, OverflowError):
            valid = False
        self.counts["valid" if valid else "invalid"] += 1

    def show(self) -> None:
        counts = self.counts
        n_schemas, n_texts = counts["compiled"] + counts["refused"], counts["valid"] + counts["invalid"]
        print(f"{self.name}: {n_schemas} schemas, {counts['compiled'] / n_schemas:.1%} compiled")
        print(f"  {n_texts} texts, {counts['valid'] / max(n_texts, 1):.2%} valid; {counts['endless']} did not end")
        print(f"  compiling: {_spread(self.compiling, 1e3)} ms")
        print(f"  mask: {_spread(self.masks, 1e6)} us, {len(self.masks)} masks")
        for reason, count in self.reasons.most_common(5):
            print(f"  {count} refused: {reason[:100]}")


def _spread(values: list[float], scale: float) -> str:
    if not values:
        return "none"
    percentile = float(np.percentile(values, 99))
    return (
        f"median {median(values) * scale:.3g}, 99th percentile {percentile * scale:.3g}, max {max(values) * scale:.3g}"
    )


def measure_ours(model: Vocabulary, seeds: range) -> Result:
    result = Result("ngramspec")
    _ = model.grammars.tokenizer
    for seed in seeds:
        rng = random.Random(seed)
        schema = whole_schema(rng)
        began = time.perf_counter()
        try:
            grammar = schema_grammar(json.dumps(schema))
            place = model.grammar(grammar)
        except GrammarError as error:
            result.counts["refused"] += 1
            result.reasons[str(error)] += 1
            continue
        result.compiling.append(time.perf_counter() - began)
        result.counts["compiled"] += 1
        for number in range(N_TEXTS):
            text = random_text(grammar, rng)
            result.count_text(schema, text)
            for token in model.tokenize(text or "", add_bos=False) if number == 0 else ():
                began = time.perf_counter()
                place.mask()
                result.masks.append(time.perf_counter() - began)
                if not place.allows(token):
                    break
                place.accept(token)
    return result


# --------------------------------------------------------------------------- llama-server


@contextmanager
def run_llama_server(program: str, model: str) -> Iterator[None]:
    command = [program, "-m", model, "--port", str(PORT), "-c", "512", "-t", "1"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for _ in range(300):
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{PORT}/health", timeout=1)
                break
            except OSError:
                time.sleep(0.1)
        yield
    finally:
        process.kill()
        process.wait()


def fetch_grammar(schema: Mapping[str, Any]) -> str:
    """Return the grammar that llama-server creates from a schema.

    Raises:
        ValueError: Schema that llama-server rejects.
    """
    body = json.dumps({"prompt": "x", "n_predict": 1, "json_schema": schema}).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{PORT}/completion", body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=30) as response:
            return str(json.load(response)["generation_settings"]["grammar"])
    except urllib.error.HTTPError as error:
        raise ValueError(json.load(error)["error"]["message"]) from error


class LlamaGrammar:
    """State of llama.cpp's own grammar at one position of a text."""

    def __init__(self, vocabulary: Vocabulary, text: str) -> None:
        self._sampler = llama.llama_sampler_init_grammar(vocabulary._vocab, text.encode(), b"root")
        if not self._sampler:
            raise ValueError("llama.cpp does not read the grammar")
        self._candidates = np.zeros(vocabulary.n_vocab, CANDIDATE)
        self._candidates["id"] = np.arange(vocabulary.n_vocab)

    def compute_mask(self) -> np.ndarray[Any, np.dtype[np.bool_]]:
        self._candidates["logit"] = 0
        data = ctypes.cast(self._candidates.ctypes.data, ctypes.POINTER(llama.llama_token_data))
        array = llama.llama_token_data_array(data=data, size=self._candidates.size, selected=-1, sorted=False)
        llama.llama_sampler_apply(self._sampler, ctypes.byref(array))
        return np.asarray(self._candidates["logit"] == 0)

    def accept(self, token: int) -> None:
        llama.llama_sampler_accept(self._sampler, token)

    def close(self) -> None:
        llama.llama_sampler_free(self._sampler)


def random_llama_text(vocabulary: Vocabulary, text: str, rng: random.Random, max_bytes: int = 400) -> str | None:
    """Return a text drawn byte by byte as `random_text` does; `None` means that it does not end."""
    grammar, raw = LlamaGrammar(vocabulary, text), b""
    try:
        while len(raw) < max_bytes:
            mask = grammar.compute_mask()
            if mask[END] and (rng.random() < 0.3 or len(raw) > 60 or mask.sum() == 1):
                return raw.decode("utf-8", "replace")
            choices = [byte for byte in range(255) if mask[FIRST_BYTE + byte]]
            choices = [byte for byte in choices if byte < 128] or choices
            closing = [byte for byte in choices if byte in b'"}]']
            letters = [byte for byte in choices if byte > 32 and byte != 92] or choices
            if not choices:
                return None
            byte = rng.choice(closing if closing and (len(raw) > 60 or rng.random() < 0.3) else letters)
            grammar.accept(FIRST_BYTE + byte)
            raw += bytes([byte])
        return None
    finally:
        grammar.close()


def measure_llama_server(model: Vocabulary, small: Vocabulary, seeds: range) -> Result:
    result = Result("llama-server")
    for seed in seeds:
        rng = random.Random(seed)
        schema = whole_schema(rng)
        began = time.perf_counter()
        try:
            text = fetch_grammar(schema)
            if not text:
                raise ValueError("llama-server answers with any text")
            LlamaGrammar(small, text).close()
        except ValueError as error:
            result.counts["refused"] += 1
            result.reasons[str(error)] += 1
            continue
        result.compiling.append(time.perf_counter() - began)
        result.counts["compiled"] += 1
        for number in range(N_TEXTS):
            sample = random_llama_text(small, text, rng)
            result.count_text(schema, sample)
            if number or sample is None:
                continue
            place = LlamaGrammar(model, text)
            for token in model.tokenize(sample, add_bos=False)[:MAX_MASKS]:
                began = time.perf_counter()
                mask = place.compute_mask()
                result.masks.append(time.perf_counter() - began)
                if not mask[token]:
                    break
                place.accept(token)
            place.close()
    return result


def check_keywords(small: Vocabulary) -> None:
    """Print the behaviour of llama-server for each keyword and mark differences from the table."""
    for keyword, (table_value, _, examples) in KEYWORDS.items():
        results = []
        for schema, good, bad in examples:
            try:
                text = fetch_grammar(schema)
            except ValueError:
                results.append("refused")
                continue
            if not text:  # without a grammar, the response can be any text
                results.append("drops the schema")
                continue
            outcomes = [read_with_llama(small, text, example.encode()) for example in (good, bad)]
            if outcomes[0] is None or outcomes[1] is None:
                results.append("refused")
            else:
                results.append("too strict" if not outcomes[0][1] else "ignored" if outcomes[1][1] else "kept")
        worst = min(results, key=("refused", "drops the schema", "ignored", "too strict", "kept").index)
        print(f"{'ok ' if worst == table_value else '!! '} {keyword}: {worst}, in the table {table_value}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="GGUF file; of its vocabulary the masks are")
    parser.add_argument("--count", type=int, default=2000, help="schemas; default: 2000")
    parser.add_argument("--llama-server", help="program to compare with")
    parser.add_argument("--theirs", action="store_true", help="measure llama-server only")
    parser.add_argument("--keywords", action="store_true", help="compare the table of keywords instead")
    arguments = parser.parse_args()
    model, seeds = Vocabulary(arguments.model), range(arguments.count)
    if not arguments.keywords and not arguments.theirs:
        measure_ours(model, seeds).show()
    if arguments.llama_server:
        with tempfile.TemporaryDirectory() as folder, run_llama_server(arguments.llama_server, arguments.model):
            small = Vocabulary(write_words(Path(folder) / "bytes.gguf", []))
            if arguments.keywords:
                check_keywords(small)
            else:
                measure_llama_server(model, small, seeds).show()


if __name__ == "__main__":
    main()
