"""Tests of user-defined drafters and policies: the checks, and the reports of errors in their code."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.cli_runner import DEMO, run
from support.decoder_loop import drive, make_decoder, pass_seconds
from support.ear import ask, run_engine
from support.mock_shared import MockShared
from support.mock_target import MockTarget, plain_generate
from support.serving import serve

from ngramspec.data import UserCodeError
from ngramspec.drafting import make_drafter
from ngramspec.drafting.draft import Ask, Draft
from ngramspec.llama.vocabulary import Vocabulary
from ngramspec.loading.settings import LoadSettings
from ngramspec.policies import make_policy
from ngramspec.sampling.settings import Sampling
from ngramspec.steps import Step

EXAMPLES = Path(__file__).parents[1] / "examples" / "custom"
COPY = f"{EXAMPLES / 'copy_drafter.py'}:CopyDrafter"
LINE = f"{EXAMPLES / 'line_drafter.py'}:LineDrafter"
DOUBLING = f"{EXAMPLES / 'doubling_policy.py'}:DoublingPolicy"
GREEDY = Sampling()
PROMPT = [1, 2, 3, 1, 2, 3, 1, 2]

Write = Callable[..., str]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write a file with a class, from its methods, and return its name."""

    def write(body: str, base: str = "Base", name: str = "Mine") -> str:
        path = tmp_path / "mine.py"
        path.write_text(
            "from ngramspec import Draft, Drafter, Policy\n"
            "class Base(Drafter):\n"
            "    def begin(self, prompt): pass\n"
            "    def propose(self, ask): return Draft((1, 2))\n"
            "    def accept(self, tokens): pass\n"
            f"class {name}({base}):\n"
            f"    {body}\n"
        )
        return f"{path}:{name}"

    return write


def draft_of(name: str, limit: int = 4, n_vocab: int | None = 10, **options: Any) -> Draft:
    drafter = make_drafter(name, vocabulary=None if n_vocab is None else MockTarget(n_vocab))
    drafter.begin(PROMPT)
    return drafter.propose(Ask(limit, **options))


@pytest.mark.parametrize(
    ("body", "base", "message"),
    [
        ("pass", "Drafter", "lacks the methods: accept, begin, propose"),
        ("def begin(self, prompt): pass", "Drafter", "lacks the methods: accept, propose"),
        ("pass", "", "must be derived from ngramspec.Drafter"),
        ("def __init__(self, size): pass", "Base", "must accept no arguments: missing a required argument: 'size'"),
        ("def __init__(self): int('x')", "Base", "failed: ValueError: invalid literal.* line 7"),
        ("1 / 0", "Base", "failed: ZeroDivisionError: division by zero .*mine.py, line 7"),
        ("def (", "Base", "failed: SyntaxError: .*mine.py, line 7"),
        ("import absent_module", "Base", "failed: ModuleNotFoundError: No module named 'absent_module' .*line 7"),
        ("import sys; sys.exit(3)", "Base", "failed: SystemExit: 3"),
    ],
)
def test_make_drafter_rejects_a_user_class_in_one_line(write: Write, body: str, base: str, message: str) -> None:
    with pytest.raises(UserCodeError, match=message) as raised:
        make_drafter(write(body, base))
    assert "\n" not in str(raised.value)


def test_make_drafter_rejects_a_name_without_a_class(write: Write) -> None:
    file = write("pass").removesuffix(":Mine")
    for name, message in (
        ("absent.py:Mine", "cannot read absent.py: No such file"),
        (f"{file}:Other", "has no class 'Other'; its classes for this option: Base, Mine"),
        (file, "does not name a class; use FILE.py:Class"),
        (f"{file}:", "does not name a class; use FILE.py:Class"),
    ):
        with pytest.raises(UserCodeError, match=message):
            make_drafter(name)


def test_load_settings_with_user_class_checks_without_constructing_it(write: Write) -> None:
    assert LoadSettings(drafter=write("def __init__(self): print(1 / 0)")).drafter.endswith("mine.py:Mine")
    for option, base in (("drafter", "Drafter"), ("policy", "Policy")):
        with pytest.raises(UserCodeError, match="lacks the methods"):
            LoadSettings(**{option: write("pass", base)})
    with pytest.raises(ValueError, match="does not use a memory"):
        LoadSettings(drafter=COPY, memory="notes")


def test_user_class_file_reloads_only_after_change_and_adds_no_files(write: Write) -> None:
    name = write("tokens = []; tokens.append(1); propose = lambda self, ask: Draft((3,))")
    path = Path(name.removesuffix(":Mine"))
    assert draft_of(name).tokens == (3,)
    path.write_text(path.read_text().replace("(3,)", "(4,)"))
    os.utime(path, ns=(1, 1))
    assert draft_of(name).tokens == (4,)
    assert [file.name for file in path.parent.iterdir()] == ["mine.py"]


def test_user_drafter_draft_keeps_only_verifiable_tokens(write: Write) -> None:
    def tokens(expression: str, **options: Any) -> tuple[int, ...]:
        return draft_of(write(f"propose = lambda self, ask: Draft({expression})"), **options).tokens

    assert tokens("(1, 2, 3, 4, 5, 6)") == (1, 2, 3, 4)
    assert tokens("(1, 2, 10, 4)") == (1, 2)
    assert tokens("(1, 2, 10, 4)", n_vocab=None) == (1, 2, 10, 4)
    assert tokens("[-1, 2]") == ()
    assert tokens("__import__('numpy').array([1, 2])") == (1, 2)

    known = "match_lengths=(3, 4, 5), context_counts=(1,), acceptance_probs=(0.1, 0.2, 0.3, 0.4)"
    draft = draft_of(write(f"propose = lambda self, ask: Draft((1, 2, 3), {known})"))
    assert (draft.match_lengths, draft.context_counts, draft.acceptance_probs) == ((3, 4, 5), (), (0.1, 0.2, 0.3))
    assert draft.source.endswith("mine.py:Mine")


def test_user_drafter_choose_records_distribution_of_each_token(write: Write) -> None:
    drawn = write(
        "def propose(self, ask):\n"
        "        [ask.choose(7, {1: 3, 12: 9, 2: 1, 5: 0}) for _ in range(6)]\n"
        "        return Draft((9,), q=({9: 1.0},), acceptance_probs=(0.9,) * 4)"
    )
    draft = draft_of(drawn, choose=lambda offset, weights: [*weights][offset % 2], fixed_length=True)
    assert draft.tokens == (1, 2, 1, 2)
    assert draft.q == ({1: 0.75, 2: 0.25},) * 4
    assert draft.acceptance_probs == ()  # Estimates could depend on the drawn tokens.
    certain = draft_of(write("pass"), choose=lambda *_: 1, fixed_length=True)
    assert (certain.tokens, certain.q) == ((1, 2), ({1: 1.0}, {2: 1.0}))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("propose = lambda self, ask: [1]", "propose must return a Draft, not list"),
        ("propose = lambda self, ask: Draft((1.5,))", "propose must return a Draft of token ids"),
        ("propose = lambda self, ask: Draft(3)", "propose must return a Draft of token ids"),
        ("propose = lambda self: Draft()", "takes 1 positional argument but 2 were given"),
        ("propose = lambda self, ask: 1 / 0", "ZeroDivisionError: division by zero .*mine.py, line 7"),
        ("def begin(self, prompt): prompt.index(99)", "ValueError: 99 is not in list .*mine.py, line 7"),
        ("def accept(self, tokens): tokens.x", "AttributeError: .*mine.py, line 7"),
        ("def propose(self, ask): ask.choose(0, {-1: 2})", "choose requires positive weights.* line 7"),
    ],
)
def test_user_drafter_errors_name_file_and_line(write: Write, body: str, message: str) -> None:
    drafter = make_drafter(write(body), vocabulary=MockTarget(10))
    drafter.begin(PROMPT)
    assert drafter.accept([1]) == 0
    for _ in range(2):
        with pytest.raises(UserCodeError, match=message) as raised:
            drafter.propose(Ask(4, lambda _, weights: next(iter(weights))))
        assert "\n" not in str(raised.value)


def test_user_drafter_error_ends_with_its_request(write: Write) -> None:
    drafter = make_drafter(write("def begin(self, prompt): 1 / (prompt[0] - 9)"))
    drafter.begin([9])
    with pytest.raises(UserCodeError):
        drafter.propose(Ask(4))
    drafter.begin([8])
    assert drafter.propose(Ask(4)).tokens == (1, 2)
    assert drafter.accept((1, 3)) == 1  # the number of correct tokens, whatever the user's method returns
    assert drafter.accept((1,)) == 0


def test_user_drafter_receives_copies_that_it_cannot_change(write: Write) -> None:
    drafter = make_drafter(
        write(
            "wants_logits = True\n"
            "    def begin(self, prompt): prompt.clear()\n"
            "    def observe_logits(self, tokens, rows, n_accepted=0): rows[:] = 0"
        )
    )
    prompt, rows = list(PROMPT), np.ones((2, 3), np.float32)
    drafter.begin(prompt)
    assert drafter.wants_logits
    drafter.observe_logits([1, 2], rows)
    assert prompt == PROMPT
    assert (rows == 1).all()
    with pytest.raises(UserCodeError, match="read-only"):
        drafter.propose(Ask(4))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("limit = lambda self: 'two'", "limit must return an integer, not 'two'"),
        ("limit = lambda self: 1 / 0", "ZeroDivisionError: division by zero .*mine.py, line 7"),
        ("limit = lambda self: 3; plan = lambda self, *_: 3", r"plan must return two integers .*, not 3"),
        ("limit = lambda self: 3; plan = lambda self, *_: (1.5, 2)", r"plan must return two integers .*, not \(1.5"),
        ("limit = lambda self: 3; price = lambda self, *_: 0.1", "price must return None or a MarginalCost"),
        ("limit = lambda self: 3; record = lambda self, done: done.x", "AttributeError: .*mine.py, line 7"),
    ],
)
def test_user_policy_errors_name_file_and_line(write: Write, body: str, message: str) -> None:
    decoder = make_decoder(MockTarget(seconds=pass_seconds), drafter="ngram", policy=write(body, "Policy"))
    with pytest.raises(UserCodeError, match=message):
        drive(decoder, PROMPT, max_tokens=20)


def test_user_policy_plan_is_limited_to_valid_sizes(write: Write) -> None:
    draft = Draft((1, 2, 3))
    for planned, sizes, expected in (
        ("99, 99", range(1, 9), (3, 8)),
        ("-5, -5", range(1, 9), (0, 1)),
        ("3, 1", range(1, 9), (3, 4)),
        ("3, 3", (1, 2, 8), (3, 8)),
        ("3, 99", (1, 3), (2, 3)),
    ):
        policy = make_policy(write(f"limit = lambda self: 9; plan = lambda self, *_: ({planned})", "Policy"))
        assert policy.plan(draft, None, sizes) == expected
    assert make_policy(write("limit = lambda self: -1", "Policy")).limit() == 0


def test_user_policy_has_defaults_and_cannot_change_steps(write: Write) -> None:
    policy = make_policy(
        write(
            "limit = lambda self: 2\n    def record(self, done): done.tokens, done.policy_details = (), {'length': 2}",
            "Policy",
        )
    )
    assert policy.price(None, range(1, 9)) is None
    assert policy.plan(Draft((1, 2, 3)), None, range(1, 9)) == (2, 3)
    done = Step((1,))
    policy.record(done)
    assert (done.tokens, done.policy_details) == ((1,), {"length": 2.0})
    with pytest.raises(UserCodeError, match="must accept the arguments draft_max"):
        make_policy(write("limit = lambda self: 2", "Policy"), 4)
    assert make_policy(DOUBLING, 4).limit() == 1


def test_example_line_drafter_drafts_the_rest_of_the_previous_line() -> None:
    vocabulary = Vocabulary(DEMO)
    drafter = make_drafter(LINE, vocabulary=vocabulary)
    for text, expected in (("a: he went.\nb:", " he went.\n"), ("he went.\n", "he went.\n"), ("he went. She", "")):
        drafter.begin(vocabulary.tokenize(text, add_bos=False))
        assert b"".join(map(vocabulary.piece, drafter.propose(Ask(16)).tokens)).decode() == expected


def test_complete_with_user_class_drafts_and_reports_its_errors(env: dict[str, str], write: Write) -> None:
    arguments = ["complete", str(DEMO), str(EXAMPLES.parent / "greetings.py"), "-n", "30", "-t", "1", "--temp", "0"]
    plain = run(env, *arguments, "--no-draft", "--json").json
    drafted = run(env, *arguments, "--drafter", COPY, "--policy", DOUBLING, "--json").json
    assert drafted["text"] == plain["text"]
    assert drafted["accepted"] > 5
    broken = write("def accept(self, tokens): 1 / 0")
    done = run(env, *arguments, "--drafter", broken)
    assert done.code == 1
    assert "ZeroDivisionError: division by zero" in done.error_message
    assert "mine.py, line 7" in done.error_message
    run(env, *arguments, "--drafter", "absent.py:Mine", "--json").assert_failed("cannot read absent.py")


@pytest.mark.usefixtures("_new_workers")
def test_serve_with_user_drafter_drafts_and_ignores_prediction_field(env: dict[str, str]) -> None:
    answers = []
    body = {"prompt": "one two one two", "n_predict": 8, "temperature": 0}
    done = serve(env, lambda http: answers.append(http.post("/completion", json=body)), "--drafter", COPY, "-np", "2")
    assert answers[0].status_code == 200
    assert f"drafts: {COPY}" in done.err
    assert "does not use the field prediction" in done.err


def test_engine_with_user_drafter_constructs_one_per_sequence(write: Write) -> None:
    """A failing drafter only ends the request that it drafts for."""
    name = write(
        "def begin(self, prompt): self.broken = prompt[0] == 9\n"
        "    def propose(self, ask): return [Draft((1, 2)), None][self.broken]"
    )
    model = MockShared(3, peak=6.0)
    drafter = make_drafter(name, vocabulary=MockTarget(16))
    assert drafter.clone_for_sequence() is not drafter
    prompts = [[7, *PROMPT], [9, *PROMPT], [8, *PROMPT]]
    with run_engine(model, drafter=drafter) as engine:
        ears = [ask(engine, prompt, 30) for prompt in prompts]
        ends = [ear.wait() for ear in ears]
    assert [isinstance(end, UserCodeError) for end in ends] == [False, True, False]
    assert "propose must return a Draft, not NoneType" in str(ends[1])
    for prompt, ear in ((prompts[0], ears[0]), (prompts[2], ears[2])):
        assert ear.tokens == plain_generate(MockTarget(peak=6.0), prompt, 30, GREEDY)
