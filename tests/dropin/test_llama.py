"""Tests that `ngramspec.Llama`, with drafts in every pass, shows a program the same state as `llama_cpp.Llama`."""

from __future__ import annotations

import gc
import pickle
import sys
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any
from unittest import mock

import llama_cpp
import llama_cpp.llama_cpp as api
import numpy as np
import pytest
from architectures.files import architecture
from llama_cpp import LlamaGrammar, LlamaRAMCache, LogitsProcessorList, StoppingCriteriaList
from llama_cpp.llama_speculative import LlamaDraftModel as DraftModel
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding
from llguidance import LLParserLimits
from support.cli_runner import DEMO, environment, run_process
from support.hold_pass import hold_one_pass
from support.machines import CARD
from support.model_files import tiny, write_adapter
from support.twins import FREE, Twins, count_cached_tokens, generate_states, read_state, strip_call_fields

import ngramspec
from ngramspec import Target
from ngramspec.cost import store
from ngramspec.data import ModelError, TargetError
from ngramspec.dropin import llama as dropin
from ngramspec.llama import bindings, devices, rpc
from ngramspec.llama.llama_class import BorrowedSequence, prepare
from ngramspec.policies.policy import FixedPolicy

PROMPT = "def add(a, b):\n    return a + b\n\n\ndef add_three(a, b, c):\n    return"
GRAMMAR = r'root ::= "{" [ \n]* "\"name\"" ": " "\"" [a-z ]{1,9} "\", \"values\": [" [0-9]+ (", " [0-9]+){3,12} "]}"'
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temp": 0.0},
    "defaults": {},
    "hot": {"temp": 1.5, "top_k": 0, "top_p": 1.0, "min_p": 0.0},
    "one of many": {"temp": 1.0, "top_k": 5, "top_p": 0.7, "typical_p": 0.6},
    "no temperature": {"temp": -1.0},
    "mirostat 1": {"mirostat_mode": 1, "mirostat_tau": 4.0, "mirostat_eta": 0.3},
    "mirostat 2": {"mirostat_mode": 2},
    "penalties": {"temp": 0.0, "repeat_penalty": 1.3, "frequency_penalty": 0.2, "presence_penalty": 0.4},
    "penalties, sampled": {"repeat_penalty": 1.1, "frequency_penalty": 0.1},
}


@pytest.fixture
def twins() -> Iterator[Callable[..., Twins]]:
    made: list[Twins] = []

    def make(path: Path = DEMO, **settings: Any) -> Twins:
        made.append(Twins(path, **settings))
        return made[-1]

    yield make
    for pair in made:
        pair.close()


@pytest.fixture(scope="module")
def opened() -> Iterator[dict[bool, Twins]]:
    """Yield twins without and with the logits of all tokens."""
    made = {every: Twins(DEMO, logits_all=every) for every in (False, True)}
    yield made
    for pair in made.values():
        pair.close()


@pytest.fixture
def pair(opened: dict[bool, Twins]) -> Twins:
    """Return twins with the usual settings and empty caches."""
    return opened[False].reset()


@pytest.fixture
def logged(opened: dict[bool, Twins]) -> Twins:
    """Return twins that store the logits of all tokens."""
    return opened[True].reset()


def prompt(llama: Any, text: str = PROMPT) -> list[int]:
    return llama.tokenize(text.encode())


@pytest.mark.parametrize("name", SETTINGS)
def test_llama_generate_equals_parent_in_tokens(name: str, pair: Twins) -> None:
    for text in ("The cat sat on the mat. The cat sat on the", PROMPT + " a + b"):
        pair.compare(lambda llama, text=text: generate_states(llama, prompt(llama, text), 40, **SETTINGS[name]))
        assert count_cached_tokens(pair.ours) == count_cached_tokens(pair.parent)
    assert pair.drafted


def test_llama_generate_with_grammar_equals_parent_and_drafts(pair: Twins, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pair, "_rest", lambda text: [])
    sources = set()
    learn = type(pair.ours.draft_stats).add

    def note(stats: Any, done: Any) -> None:
        sources.add(done.source)
        learn(stats, done)

    grammar = LlamaGrammar.from_string(GRAMMAR, verbose=False)
    monkeypatch.setattr(type(pair.ours.draft_stats), "add", note)
    for temp in (0.0, 1.0):
        pair.compare(lambda llama, temp=temp: generate_states(llama, prompt(llama), 40, temp=temp, grammar=grammar))
    assert any("grammar" in source for source in sources)
    assert pair.drafted


def test_llama_logits_processor_receives_input_of_parent(pair: Twins) -> None:
    seen: dict[int, list[Any]] = {}

    def run(llama: Any) -> list[Any]:
        def process(ids: Any, scores: Any) -> Any:
            seen.setdefault(id(llama), []).append((ids.tolist(), scores[:50].tobytes()))
            scores[ids[-1]] -= 3.0
            return scores

        return generate_states(llama, prompt(llama), 50, temp=0.7, logits_processor=LogitsProcessorList([process]))

    pair.compare(run)
    assert seen[id(pair.ours)] == seen[id(pair.parent)]
    assert pair.drafted


def test_llama_stopping_criteria_stop_as_in_parent(logged: Twins) -> None:
    seen: list[Any] = []

    def enough(ids: Any, logits: Any) -> bool:
        seen.append((len(ids), logits.tobytes()))
        return len(ids) >= 47

    stops = StoppingCriteriaList([enough])
    found = logged.compare(lambda llama: generate_states(llama, prompt(llama), 99, temp=0.0, stopping_criteria=stops))
    assert len(found) < 99
    assert logged.drafted
    assert seen[: len(seen) // 2] == seen[len(seen) // 2 :]
    assert count_cached_tokens(logged.ours) == count_cached_tokens(logged.parent)


@pytest.mark.parametrize(
    ("stream", "settings"),
    [
        (False, {"seed": 3, "temperature": 1.0}),
        (True, {"seed": 3, "logit_bias": {40: 4.0, 41: -9.0}}),
        (True, {"temperature": 0.0, "stop": ["\n\n", "return"]}),
        (False, {"temperature": 0.0, "suffix": " # end", "echo": True}),
        (True, {"temperature": 0.0, "logprobs": 3}),
    ],
)
def test_llama_completion_equals_parent(stream: bool, settings: dict[str, Any], pair: Twins, logged: Twins) -> None:
    of = logged if "logprobs" in settings else pair
    of.compare(lambda llama: strip_call_fields(llama(PROMPT, max_tokens=40, stream=stream, **settings)))
    assert of.drafted


@pytest.mark.parametrize("stream", [False, True])
def test_llama_chat_completion_equals_parent(stream: bool, pair: Twins) -> None:
    messages = [{"role": "user", "content": "Count to ten, and again."}]
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}}
    for form in (None, {"type": "json_object"}, {"type": "json_object", "schema": schema}):
        call = {"max_tokens": 40, "seed": 5, "stream": stream, "response_format": form}
        for _ in range(2):  # The second time, the prompt is already cached.
            pair.compare(lambda llama, call=call: strip_call_fields(llama.create_chat_completion(messages, **call)))
    assert pair.drafted


@pytest.mark.parametrize("left_at", [1, 5, *(pytest.param(at, marks=pytest.mark.exhaustive) for at in (2, 17))])
def test_llama_generate_left_at_any_token_keeps_state_of_parent(left_at: int, logged: Twins) -> None:
    def run(llama: Any) -> Any:
        first = generate_states(llama, prompt(llama), left_at, temp=0.9)
        held = llama._input_ids.tolist()
        between = count_cached_tokens(llama), llama.n_tokens, llama._requires_eval
        again = generate_states(
            llama, held, 20, temp=0.9
        )  # Nothing is evaluated; the token is sampled from existing logits.
        longer = generate_states(llama, [*held, *held[:9]], 20, temp=0.9)
        shorter = generate_states(llama, held[:-3], 20, temp=0.9)
        return first, between, again, longer, shorter

    logged.compare(run)


def test_llama_save_and_load_state_during_generation_equals_parent(pair: Twins) -> None:
    def loaded_meanwhile(llama: Any) -> Any:
        stream = llama.generate(prompt(llama), temp=0.0)
        first = list(islice(stream, 5))
        state = llama.save_state()
        second = list(islice(stream, 1))
        llama.load_state(state)
        return first, second, list(islice(stream, 9)), llama.n_tokens

    def run(llama: Any) -> Any:
        stream = llama.generate(prompt(llama), temp=0.0)
        first = list(islice(stream, 13))
        state = llama.save_state()
        second = list(islice(stream, 13))
        llama.load_state(state)
        assert count_cached_tokens(llama) == llama.n_tokens
        third = list(islice(llama.generate([*prompt(llama), *first], temp=0.0), 13))
        assert second == third
        return first, second, state.n_tokens, state.input_ids[: state.n_tokens].tolist()

    pair.compare(run)
    pair.compare(loaded_meanwhile)
    stream = pair.ours.generate(prompt(pair.ours), temp=0.0)
    head = list(islice(stream, 7))
    pair.parent.load_state(pair.ours.save_state())
    rest = list(islice(pair.parent.generate([*prompt(pair.ours), *head], temp=0.0), 9))
    assert rest == list(islice(stream, 9))


def test_llama_with_ram_cache_equals_parent(pair: Twins, monkeypatch: pytest.MonkeyPatch) -> None:
    for llama in (pair.parent, pair.ours):
        monkeypatch.setattr(llama, "cache", LlamaRAMCache())
    for text in (PROMPT, "Another text of no matter.", PROMPT + " a"):
        pair.compare(
            lambda llama, text=text: strip_call_fields(llama.create_completion(text, max_tokens=30, temperature=0.0))
        )
        assert count_cached_tokens(pair.ours) == count_cached_tokens(pair.parent)


def test_llama_with_nested_generators_equals_parent(logged: Twins) -> None:
    def run(llama: Any) -> Any:
        one = llama.generate(prompt(llama), temp=0.0)
        found = [read_state(llama, token) for token in islice(one, 6)]
        two = llama.generate(prompt(llama, "Once upon a time there was"), temp=0.0)
        found += [read_state(llama, token) for token in islice(two, 6)]
        found += [read_state(llama, token) for token in islice(one, 3)]
        del one
        found += [read_state(llama, token) for token in islice(two, 6)]
        found.append(read_state(llama, two.send(prompt(llama, " and")[1:])))
        return found + [read_state(llama, token) for token in islice(two, 12)]

    logged.compare(run)


def test_llama_eval_and_sample_equal_parent(pair: Twins) -> None:
    def run(llama: Any) -> Any:
        head = list(islice(llama.generate(prompt(llama), temp=0.0), 8))
        llama.eval([head[-1]])
        found = []
        for _ in range(8):
            found.append(llama.sample(temp=0.0))
            llama.eval([found[-1]])
        llama.reset()
        llama.eval(prompt(llama))
        return head, found, llama.sample(temp=0.0), llama.n_tokens

    pair.compare(run)


def test_llama_generate_at_full_context_raises_as_parent(twins: Callable[..., Twins]) -> None:
    pair = twins(n_ctx=64)

    def run(llama: Any) -> Any:
        found = []
        with pytest.raises((RuntimeError, ValueError)) as caught:
            found.extend(read_state(llama, token) for token in llama.generate(prompt(llama, "a b c"), temp=0.0))
        return found, type(caught.value), str(caught.value), llama.n_tokens

    pair.compare(run)
    assert pair.drafted


def test_llama_with_small_batch_size_equals_parent_and_drafts(twins: Callable[..., Twins]) -> None:
    pair = twins(n_batch=8, draft=20)
    pair.compare(lambda llama: generate_states(llama, prompt(llama), 40, temp=0.0))
    assert pair.drafted


def test_llama_with_unsupported_settings_disables_drafting(twins: Callable[..., Twins]) -> None:
    for settings, reason in (({"embedding": True}, "embeddings"), ({"n_batch": 1}, "n_batch")):
        pair = twins(**settings)
        assert reason in (pair.ours.drafting_disabled_reason or "")
        if "embedding" in settings:
            pair.compare(lambda llama: llama.create_embedding(["one text", "another"])["data"])
        else:
            pair.compare(lambda llama: generate_states(llama, prompt(llama), 20, temp=0.0))
        assert not pair.ours.draft_stats.drafted


def test_llama_with_python_draft_model_warns_and_does_not_draft(twins: Callable[..., Twins]) -> None:
    with pytest.warns(UserWarning, match="does not draft if"):
        pair = twins(draft_model=LlamaPromptLookupDecoding(), logits_all=True)
    pair.compare(lambda llama: list(islice(llama.generate(prompt(llama), temp=0.0), 40)))
    assert not pair.ours.draft_stats.passes


def test_llama_after_decode_error_retries_without_drafts(pair: Twins, monkeypatch: pytest.MonkeyPatch) -> None:
    passes, submit = 0, BorrowedSequence.submit

    def fail(sequence: BorrowedSequence, tokens: Any) -> Any:
        nonlocal passes
        passes += 1
        if passes > 4 and len(tokens) > 1:
            raise TargetError("no room")
        submit(sequence, tokens)

    monkeypatch.setattr(BorrowedSequence, "submit", fail)
    pair.compare(lambda llama: generate_states(llama, prompt(llama), 40, temp=0.9))
    assert passes > 4


def test_llama_with_lora_equals_parent_and_has_own_fingerprint(twins: Callable[..., Twins], tmp_path: Path) -> None:
    file = write_adapter(tmp_path / "lora.gguf", DEMO, ["attn_q.weight"], rank=2)
    pair = twins(lora_path=str(file), lora_scale=0.5)
    pair.compare(lambda llama: generate_states(llama, prompt(llama), 20, **SETTINGS["greedy"]))
    assert pair.drafted
    borrowed = BorrowedSequence(pair.ours)
    with borrowed.trial("fast") as trial:
        rows = trial.evaluate(prompt(pair.ours), 1)
    borrowed.release()
    pair.ours.reset()
    pair.ours.eval(prompt(pair.ours))
    row = llama_cpp.llama_get_logits_ith(pair.ours.ctx, -1)
    assert rows[0] == pytest.approx(row[: pair.ours.n_vocab()], abs=0.05)
    other = twins(lora_path=str(file), lora_scale=0.25)
    assert BorrowedSequence(other.ours).fingerprint != borrowed.fingerprint


def test_llama_rejects_invalid_arguments(tmp_path: Path) -> None:
    # llama-cpp-python crashes on these arguments.
    for path, words in ((tmp_path / "a.gguf", "no such adapter file"), (DEMO, "is not a LoRA adapter for demo.gguf")):
        with pytest.raises(ModelError, match=words):
            ngramspec.Llama(str(DEMO), lora_path=str(path), verbose=False)
    with pytest.raises(ValueError, match="exact must be one of: auto, on, off, got 'yes'"):
        ngramspec.Llama(str(DEMO), exact="yes")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="does not exist"):
        ngramspec.Llama("nowhere.gguf", verbose=False)


def test_llama_without_references_is_freed_immediately(twins: Callable[..., Twins]) -> None:
    pair = twins()
    pair.call_both(lambda llama: generate_states(llama, prompt(llama), 12, temp=0.0))
    ours = weakref.ref(pair.ours)
    gc.disable()
    try:
        pair.ours = pair.parent
        assert ours() is None
    finally:
        gc.enable()


def test_llama_can_be_pickled_and_closed_during_generation(
    pair: Twins, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(pair.ours, "exact", "on")
    twin = pickle.loads(pickle.dumps(pair.ours))
    assert (type(twin), twin.exact, twin.persist_stats) == (ngramspec.Llama, "on", False)
    expected = pair.compare(lambda llama: [seen.token for seen in generate_states(llama, prompt(llama), 9, temp=0.0)])
    stream = twin.generate(prompt(twin), temp=0.0)
    assert list(islice(stream, 9)) == expected
    twin.close()
    stream.close()
    twin.close()


@pytest.mark.usefixtures("_comparing")
def test_llama_by_default_stores_times_and_keeps_text(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    settings: dict[str, Any] = {"n_ctx": 512, "n_threads": 1, "n_threads_batch": 1, "verbose": False}
    ours, parent = ngramspec.Llama(str(DEMO), **settings), llama_cpp.Llama(str(DEMO), **settings)
    text = "one two three four five six seven eight nine ten " * 6
    expected = generate_states(parent, prompt(parent, text), 60, temp=0.0)
    assert generate_states(ours, prompt(ours, text), 60, temp=0.0) == expected
    assert ours.draft_stats.cost > 0
    parent.close()
    ours.close()
    assert sorted(path.suffix for path in tmp_path.rglob("*.*") if path.is_file()) == [".json", ".json", ".npz"]


def test_llama_with_prediction_keeps_text() -> None:
    told = []
    for prediction in ("", "def total(items):\n    return sum(items)\n"):
        llm = ngramspec.Llama(
            str(DEMO), n_ctx=512, n_threads=1, verbose=False, persist_stats=False, prediction=prediction
        )
        told.append(llm.create_completion(PROMPT, max_tokens=40, temperature=0)["choices"][0]["text"])
        evaluator = llm._evaluator
        assert evaluator is not None
        assert evaluator.drafts.drafter is not None
        predicted = list(evaluator.drafts.drafter.prediction or ())
        assert predicted == (llm.tokenize(prediction.encode(), add_bos=False) if prediction else [])
        llm.close()
    assert told[0] == told[1]


def test_llama_during_decode_rejects_calls_of_second_thread(pair: Twins, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = pair.ours
    with hold_one_pass(monkeypatch) as (held, go_on), ThreadPoolExecutor(1) as other:
        first = other.submit(ours.create_completion, PROMPT, max_tokens=8, temperature=0)
        assert held.wait(60)
        for call in (
            lambda: ours.create_completion("Hi", max_tokens=2),
            lambda: ours.eval([5]),
            ours.sample,
            ours.reset,
            ours.save_state,
        ):
            with pytest.raises(RuntimeError, match="two threads at once"):
                call()
        go_on.set()
        answer = first.result()["choices"]
    ours.reset()
    assert ours.create_completion(PROMPT, max_tokens=8, temperature=0)["choices"] == answer


def test_llama_sample_without_logits_raises(pair: Twins) -> None:
    pair.ours.eval(prompt(pair.ours))
    with pytest.raises(RuntimeError, match="another generation was started"):
        pair.ours.sample(idx=0)


_LEFT_OPEN = """
import sys
from ngramspec import Llama

llama = Llama(sys.argv[1], exact="off", n_ctx=128, n_threads=1, verbose=False)
stream = llama.generate(llama.tokenize(b"one two three one two three one"), temp=0.0)
for _ in range(80):
    next(stream)
assert llama.draft_stats.passes
"""


def test_llama_stream_left_open_at_exit_saves_state_silently(tmp_path: Path) -> None:
    done = run_process(environment(tmp_path), DEMO, command=[sys.executable, "-c", _LEFT_OPEN])
    assert (done.code, done.err) == (0, "")
    assert list(tmp_path.rglob("*-times.json"))
    assert list(tmp_path.rglob("*.npz"))


def test_llama_generate_with_grammar_beyond_limits_of_drafts_equals_parent(
    pair: Twins, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ngramspec.grammars.lark.LIMITS", LLParserLimits(max_items_in_row=3, verbose_errors=False))
    text = 'root ::= x{0,30}\nx ::= y "!"?\ny ::= [a-z ] | "(" root ")"'
    grammar = LlamaGrammar.from_string(text, verbose=False)
    pair.compare(lambda llama: generate_states(llama, prompt(llama), 20, temp=0.0, grammar=grammar))


NAMES = ("mamba", "qwen35", "gemma3")
"""Models with a recurrent state, a recurrent state with snapshots, and sliding windows."""

MORE = ("jamba", "lfm2")

GREEDY_AND_SAMPLED: tuple[dict[str, Any], ...] = ({"temp": 0.0}, {"temp": 1.0, "repeat_penalty": 1.1})


def tiny_twins(name: str, **settings: Any) -> Twins:
    """Return twins in single precision, in which another batch only changes the last bits of repeated tokens."""
    return Twins(architecture(name, half=False), **settings)


@pytest.mark.parametrize("name", [*NAMES, *(pytest.param(name, marks=pytest.mark.exhaustive) for name in MORE)])
def test_llama_on_special_memory_equals_parent(name: str) -> None:
    pair = tiny_twins(name)
    assert pair.ours.drafting_disabled_reason is None

    def run(llama: Any, settings: dict[str, Any]) -> Any:
        prompt = llama.tokenize(b"A text that is longer than the sliding window. " * 9)
        text = generate_states(llama, prompt, 40, **settings)
        held = llama._input_ids.tolist()
        between = count_cached_tokens(llama), llama._requires_eval
        again = generate_states(llama, held, 7, **settings)
        stream = llama.generate([*held, *held[5:19]], **settings)
        longer = list(islice(stream, 15))
        state = llama.save_state()
        longer += islice(stream, 9)
        stream.close()
        llama.load_state(state)
        held = llama._input_ids.tolist()
        last = generate_states(llama, [*held, *held[3:9]], 9, **settings)
        return text, between, again, longer, last, count_cached_tokens(llama)

    for settings in GREEDY_AND_SAMPLED:
        pair.compare(lambda llama, settings=settings: run(llama, settings))
    assert pair.drafted
    pair.close()


def test_checkpoints_of_a_recurrent_state_stay_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "devices", lambda: [CARD])
    pair = tiny_twins("mamba", n_gpu_layers=-1)
    restore = api.llama_state_seq_set_data_ext
    with mock.patch.object(api, "llama_state_seq_set_data_ext", wraps=restore) as restored:
        pair.compare(lambda llama: generate_states(llama, llama.tokenize(b"A text. " * 20), 20, temp=0.0))
    assert pair.drafted
    assert {call.args[-1] for call in restored.mock_calls} == {3}
    pair.close()


@pytest.mark.parametrize(
    ("name", "reason"),
    [("gemma3", "swa_full"), pytest.param("deepseek4", "a sliding window", marks=pytest.mark.exhaustive)],
)
def test_llama_with_sliding_window_cache_disables_drafting(name: str, reason: str) -> None:
    pair = tiny_twins(name, swa_full=False)
    assert reason in (pair.ours.drafting_disabled_reason or "")
    pair.compare(lambda llama: generate_states(llama, llama.tokenize(b"A text. " * 20), 20, temp=0.0))
    assert not pair.ours.draft_stats.passes
    pair.close()


METHODS = "def value_0(self):\n    return self._value_0\n\n\ndef value_1("
SMALL: dict[str, Any] = {"n_ctx": 512, "n_threads": 1, "n_threads_batch": 1, "verbose": False}
OURS: dict[str, Any] = {**SMALL, "exact": "off", "keep": False}


def complete(llama: Any, **settings: Any) -> str:
    return llama.create_completion(METHODS, max_tokens=40, **settings)["choices"][0]["text"]


def test_llama_with_open_draft_model_drafts_and_leaves_it_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every pass drafts four tokens, whatever they cost. `test_front_ends` tests the name of a file."""
    monkeypatch.setattr(dropin, "make_policy", lambda *_: FixedPolicy(4))
    monkeypatch.setattr(store, "_read", lambda _: FREE.copy())
    with Target(DEMO, ctx_size=512, threads=1) as small:
        ours, parent = ngramspec.Llama(str(DEMO), draft_model=small, **OURS), llama_cpp.Llama(str(DEMO), **SMALL)
        for _ in range(2):  # The second run starts with both caches of the first.
            assert complete(ours, temperature=0.0) == complete(parent, temperature=0.0)
        stats = ours.draft_stats
        assert stats.accepted > 0.7 * stats.drafted > 35
        for made in (ours, parent):
            made.close()
        assert small.vocabulary.tokenize("still open")


def test_llama_with_draft_model_file_pickles_its_path() -> None:
    ours = ngramspec.Llama(str(DEMO), draft_model=str(DEMO), **OURS)
    twin = pickle.loads(pickle.dumps(ours))
    assert twin._small_model is not None
    for made in (ours, twin):
        made.close()


def test_llama_rejects_unusable_draft_model(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="their vocabularies differ at token"):
        ngramspec.Llama(str(DEMO), draft_model=tiny("llama"), **OURS)
    with pytest.raises(ModelError, match=r"gone\.gguf"):
        ngramspec.Llama(str(DEMO), draft_model=str(tmp_path / "gone.gguf"), **OURS)
    ours = ngramspec.Llama(str(DEMO), **OURS)
    with pytest.raises(TypeError, match="must be the path of a file"):
        ngramspec.Llama(str(DEMO), draft_model=ours, **OURS)
    ours.close()


def test_llama_with_draft_model_leaves_llama_cpp_log_intact(capfd: pytest.CaptureFixture[str]) -> None:
    ours = ngramspec.Llama(str(DEMO), draft_model=str(DEMO), **{**OURS, "verbose": True})
    ours.close()
    capfd.readouterr()
    llama_cpp.Llama(str(DEMO), **{**SMALL, "verbose": True}).close()
    assert "llama_model_loader" in capfd.readouterr().err


def test_llama_rejects_unusable_rpc_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="'host' is not HOST:PORT"):
        ngramspec.Llama(str(DEMO), rpc_servers="host", **OURS)
    with pytest.raises(ValueError, match="n_gpu_layers 0 cannot be combined"):
        ngramspec.Llama(str(DEMO), rpc_servers="127.0.0.1:1", n_gpu_layers=0, **OURS)

    def none() -> int:
        raise ModelError("built without -DGGML_RPC=on")

    monkeypatch.setattr(rpc, "registry", none)
    with pytest.raises(ModelError, match="DGGML_RPC=on"):
        ngramspec.Llama(str(DEMO), rpc_servers="127.0.0.1:1", **OURS)


def test_llama_with_rpc_servers_connects_before_load(monkeypatch: pytest.MonkeyPatch) -> None:
    joined: list[Any] = []

    def connect(names: Any) -> None:
        bindings.init_backend()
        joined.append(names)

    monkeypatch.setattr(rpc, "connect", connect)
    ours = ngramspec.Llama(str(DEMO), rpc_servers="a:1, b:2", **OURS)
    assert joined == [("a:1", "b:2")]
    assert ours.model_params.n_gpu_layers > 1000
    assert ours.__getstate__()["rpc_servers"] == "a:1, b:2"
    ours.close()


def test_llama_draft_model_drafts_only_repetitions() -> None:
    drafts = ngramspec.LlamaDraftModel(num_pred_tokens=4)
    assert isinstance(drafts, DraftModel)
    text = [*range(50, 80), *range(50, 60)]
    first = drafts(np.array(text, np.intc))
    assert first.tolist() == [60, 61, 62, 63]
    assert first.dtype == np.intc
    assert drafts(np.array([*text, 60, 61], np.intc)).tolist() == [62, 63, 64, 65]
    assert drafts(np.array([1, 2, 3], np.intc)).size == 0
    assert drafts(np.array(text, np.intc)).tolist() == [60, 61, 62, 63]


def test_llama_draft_model_keeps_text_of_parent() -> None:
    prepare(0)
    plain = llama_cpp.Llama(str(DEMO), logits_all=True, **SMALL)
    drafted = llama_cpp.Llama(str(DEMO), logits_all=True, draft_model=ngramspec.LlamaDraftModel(), **SMALL)
    prompt = plain.tokenize(b"one two three four five six seven eight nine ten " * 6)
    assert list(islice(drafted.generate(prompt, temp=0.0), 80)) == list(islice(plain.generate(prompt, temp=0.0), 80))
    plain.close()
    drafted.close()
