"""The worker's process: what it prepares is what this process would make, and nothing in it reaches this process."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator

import pytest

from ngramspec.errors import GrammarError
from ngramspec.grammars import worker as module
from ngramspec.grammars.json_schema import json_rule
from ngramspec.grammars.lark import Lark
from ngramspec.grammars.worker import Worker, compiled


@pytest.fixture
def worker() -> Iterator[Worker]:
    made = Worker()
    yield made
    made.close()


def test_results_and_errors_are_those_of_the_function(worker: Worker) -> None:
    schema = {"type": "string", "maxLength": 3}
    assert worker.call(json_rule, schema, strict=True) == json_rule(schema)
    with pytest.raises(GrammarError, match="unsupported keywords: not"):
        worker.call(json_rule, {"not": {}})
    assert worker.call(os.getpid) != os.getpid()


def test_a_compiled_grammar_knows_the_tokens_of_a_vocabulary(worker: Worker) -> None:
    grammar = worker.call(compiled, 'root ::= <a> "b"', {"<a>": 40_000}, 50_000)
    assert isinstance(grammar, Lark)
    assert "<[40000]>" in grammar
    assert worker.call(compiled, grammar, {}, 50_000) == grammar
    for text, names in (("root ::= <a>", {}), ("root ::= (", {}), ("root ::= <[40000]>", {})):
        with pytest.raises(GrammarError):
            worker.call(compiled, text, names, 5000)


def test_what_takes_too_long_or_ends_the_process_is_an_error(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    worker.call(os.getpid)
    monkeypatch.setattr(module, "SECONDS", 0.2)
    with pytest.raises(GrammarError, match=r"^the grammar takes more than 0.2 s to prepare$"):
        worker.call(sum, range(10**12))
    monkeypatch.setattr(module, "SECONDS", 5.0)
    monkeypatch.setattr(module, "PATIENCE", 0.3)
    with pytest.raises(GrammarError, match=r"^the grammar takes more than 5 s to prepare$"):
        worker.call(time.sleep, 30)
    monkeypatch.undo()
    with pytest.raises(GrammarError, match=r"^the grammar takes too much memory to prepare$"):
        worker.call(os._exit, 1)
    assert worker.call(json_rule, {}) == json_rule({})


def test_closing_ends_a_call_at_work(worker: Worker) -> None:
    worker.call(os.getpid)
    errors: list[str] = []

    def call() -> None:
        try:
            worker.call(time.sleep, 30)
        except GrammarError as error:
            errors.append(str(error))

    thread = threading.Thread(target=call)
    thread.start()
    while not worker._lock.locked():
        time.sleep(0.01)
    with worker.session():
        worker.close()
        thread.join()
        assert errors == ["the server is shutting down"]
        with pytest.raises(GrammarError, match="shutting down"):
            worker.call(os.getppid)
    assert worker.call(os.getppid) == os.getpid()
