"""Tests of grammars over a vocabulary: masks, single tokens, rollback, limits, errors, and looking ahead."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from support.cli_runner import DEMO
from support.forced_calls import MARKS, forced_calls
from support.json_texts import whole_schema
from support.model_files import END, write_vocabulary

from ngramspec.cost.fixed_curves import make_fixed_curve
from ngramspec.data import GrammarError, NGramSpecError
from ngramspec.decoding.decoder import SpeculativeDecoder
from ngramspec.drafting.draft import Draft
from ngramspec.drafting.grammar import GrammarGuide
from ngramspec.grammars.json_schema import schema_grammar
from ngramspec.grammars.lark import pattern_grammar
from ngramspec.llama.grammar import Grammar, Grammars
from ngramspec.llama.target import Target
from ngramspec.llama.vocabulary import Vocabulary
from ngramspec.sampling.settings import Sampling


def token(vocabulary: Vocabulary, text: str | bytes) -> int:
    raw = text.encode() if isinstance(text, str) else text
    return next(t for t in reversed(range(vocabulary.n_vocab)) if vocabulary.piece(t) == raw)


def allowed(grammar: Grammar) -> set[int]:
    return set(np.flatnonzero(grammar.mask_allowed(np.arange(grammar.vocabulary.n_vocab))).tolist())


@pytest.mark.parametrize(
    "text",
    [f'root ::= ("a" (<[{END}]> | "b") "b" | "c")*', f'root ::= "a"* <[{END}]> "b"+ "c"'],
    ids=["ending token", "later"],
)
def test_grammar_rollback_restores_position(text: str, word_vocabulary: Vocabulary) -> None:
    rng = random.Random(2)
    grammar = word_vocabulary.grammar(text)
    for _ in range(30):
        before = allowed(grammar)
        count = 0
        while count < 4 and (choices := sorted(allowed(grammar))):
            grammar.accept(rng.choice(choices))
            count += 1
        grammar.rollback(count)
        assert allowed(grammar) == before
        grammar.accept(rng.choice(sorted(before - {END})))


def test_grammar_count_allowed_keeps_position(word_vocabulary: Vocabulary) -> None:
    grammar = word_vocabulary.grammar('root ::= "a" "b" "c"')
    a, b, ab, c = (token(word_vocabulary, text) for text in ("a", "b", "ab", "c"))
    for tokens, count in (
        ([a, b, c, END], 4),
        ([ab, c], 2),
        ([ab, b], 1),
        ([b], 0),
        ([a, END], 1),
        ([END], 0),
        ([a, -1], 1),
        ([word_vocabulary.n_vocab], 0),
        ([], 0),
    ):
        assert grammar.count_allowed(tokens) == count, tokens
    for one in (ab, c):
        grammar.accept(one)
    assert allowed(grammar) == {END}
    assert grammar.count_allowed([END]) == 1
    assert grammar.count_allowed([a]) == 0
    grammar.accept(END)
    assert not grammar.allows(a)
    grammar.rollback(2)
    assert {word_vocabulary.piece(t) for t in allowed(grammar)} == {b"c"}


def test_grammar_rejects_invalid_token_ids_and_forbidden_tokens(word_vocabulary: Vocabulary) -> None:
    grammar = word_vocabulary.grammar("root ::= .*")
    assert not any(grammar.allows(t) for t in (-1, word_vocabulary.n_vocab, 2**31 - 1))
    with pytest.raises(GrammarError):
        word_vocabulary.grammar('root ::= "a"').accept(token(word_vocabulary, "b"))


def test_grammar_inside_character_allows_only_its_next_byte(word_vocabulary: Vocabulary) -> None:
    grammar = word_vocabulary.grammar('root ::= ("a" | "\\u00e9")*')
    first, second = (token(word_vocabulary, byte) for byte in (b"\xc3", b"\xa9"))
    assert allowed(grammar) >= {first, END}
    assert second not in allowed(grammar)
    grammar.accept(first)
    assert {word_vocabulary.piece(t) for t in allowed(grammar)} == {b"\xa9"}
    assert not grammar.allows(END)


CONTROLLED = [
    schema_grammar('{"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}'),
    pattern_grammar("(?s:.*)"),
    "root ::= [^~]*",
]


@pytest.mark.parametrize("text", CONTROLLED, ids=lambda text: text[-20:])
def test_grammar_allows_no_control_tokens_inside_text(text: str, demo_vocabulary: Vocabulary) -> None:
    controls = {t for t in range(demo_vocabulary.n_vocab) if not demo_vocabulary.piece(t)}
    ends = {t for t in controls if demo_vocabulary.is_eog(t)}
    assert controls - ends
    grammar = demo_vocabulary.grammar(text)
    for one in demo_vocabulary.tokenize('{"a": "some text', add_bos=False):
        assert allowed(grammar) & controls <= ends
        assert grammar.allows(one)
        grammar.accept(one)
    assert allowed(grammar) & controls == (ends if text.startswith("root") or "(?s" in text else set())


def test_grammar_accepts_tokens_by_id_and_name(demo_vocabulary: Vocabulary) -> None:
    ((name, control), *_) = [one for one in demo_vocabulary.controls.items() if one[0].startswith("<")]
    plain = demo_vocabulary.tokenize("text", add_bos=False)[0]
    end = next(filter(demo_vocabulary.is_eog, range(demo_vocabulary.n_vocab)))
    for part, one in ((f"<[{control}]>", control), (name, control), (f"<[{plain}]>", plain), (f"<[{end}]>", end)):
        grammar = demo_vocabulary.grammar(f'root ::= {part} "a"')
        assert allowed(grammar) == {one}
        assert grammar.allows(one)
    assert allowed(demo_vocabulary.grammar(f"root ::= !<[{plain}]>")) >= {control}
    assert plain not in allowed(demo_vocabulary.grammar(f"root ::= !<[{plain}]>"))
    with pytest.raises(GrammarError, match="the vocabulary has no such token in line 1, at '<unknown>'"):
        demo_vocabulary.grammar("root ::= <unknown>")


def test_grammar_over_limit_raises_and_rollback_recovers(word_vocabulary: Vocabulary) -> None:
    """The readings of a text with empty repetitions exceed the number of items that llguidance allows."""
    explosive = 'root ::= c{0,900}\nc ::= b{0,900} root?\nb ::= a{0,900}\na ::= "a" | "b"'
    grammar = word_vocabulary.grammar(explosive)
    a = token(word_vocabulary, "a")
    accepted = 0
    with pytest.raises(GrammarError, match=r"^the grammar exceeds a limit: .*max is 2000"):  # noqa: PT012
        while accepted < 40:
            assert grammar.mask_allowed(np.array([a]))[0]
            grammar.accept(a)
            accepted += 1
    grammar.rollback(2)
    assert grammar.allows(a)


def test_grammars_hold_keeps_compiled_grammar_until_release(
    word_vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ngramspec.llama.grammar._MAX_CHARACTERS", 100)
    grammars = Grammars(word_vocabulary)
    held = 'root ::= "a" # held'
    grammars.hold(held)
    first = grammars.compile(held)
    for number in range(9):
        grammars.compile(f'root ::= "a" # {number}')
    assert grammars.compile(held) is first
    grammars.release(held)
    for number in range(9):
        grammars.compile(f'root ::= "b" # {number}')
    assert grammars.compile(held) is not first
    with pytest.raises(GrammarError, match="no rule named root"):
        grammars.hold('start ::= "a"')


def test_grammars_release_keeps_only_latest_grammars(word_vocabulary: Vocabulary) -> None:
    grammars = Grammars(word_vocabulary)
    texts = [f'root ::= "a" # {number}' for number in range(20)]
    for text in texts:
        grammars.hold(text)
    matchers = [grammars.compile(text) for text in texts]
    for text in texts:
        grammars.release(text)
    kept = [grammars.compile(text) is matcher for text, matcher in zip(texts[::-1], matchers[::-1], strict=True)]
    assert kept == [True] * 8 + [False] * 12


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_generate_with_grammar_after_target_close_raises(temperature: float) -> None:
    """A grammar keeps no pointers into freed memory."""
    target = Target(DEMO, ctx_size=256, threads=1)
    sampling = Sampling(temperature, seed=1, grammar="root ::= [a-z ]{40,}")
    decoder = SpeculativeDecoder(target, exact="off", times=make_fixed_curve({1: 1.0}))
    steps = decoder.generate([5, 6], max_tokens=99, sampling=sampling)
    next(steps)
    next(steps)
    target.close()
    with pytest.raises(ValueError, match=r" is closed$"):
        next(steps)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("root ::= [a-z", "does not parse: the class that begins here has no end in line 1, at '.a-z'"),
        ('root ::= "a"\n\nother := "b"\n', "does not parse: expected ::= in line 3, at ':= \"b\"'"),
        ("root ::= nowhere\n", "does not parse: there is no rule 'nowhere', in line 1"),
        ('root ::= "a" )', r"does not parse: expected a line end in line 1, at '\)'"),
        ('root ::= "a"\nx ::= ("b"\n', r"does not parse: expected '\)' in line 3"),
        ("root ::= *", "does not parse: expected something to repeat before it in line 1"),
        ('root ::= "\\q"', "does not parse: unknown escape in line 1"),
        ('root ::= "\\x4"', "does not parse: unknown escape in line 1"),
        ('root ::= "\\ud800"', "does not parse: the escape is not a character in line 1"),
        ('root ::= "a"{3,2x}', "does not parse: expected {N}, {N,} or {N,M} in line 1, at '{3,2x}'"),
        ('root ::= "a"{3,2}', "does not parse: the bounds must ascend and be at most 1,000,000 in line 1"),
        ('root ::= "a"{9999999}', "does not parse: the bounds must ascend and be at most 1,000,000 in line 1"),
        ("root ::= []", "does not parse: the class contains no character in line 1"),
        ("{}", "does not parse: expected the name of a rule in line 1, at '{}'"),
        ('start ::= "a"', "has no rule named root"),
        ("root ::= <think>", "does not parse: the vocabulary has no such token in line 1"),
        ("# nothing but a comment\n", "has no rule named root"),
        ("", "has no rule named root"),
        ('root ::= "a"\0', "does not parse: unexpected character in line 1"),
        ('root ::= "\udc80"', "does not parse: character 10 of it is not valid text"),
        ('root ::=\n("a" ' + "(" * 100_000, "is nested more than 60 brackets deep in line 2"),
        ("root ::= root", "comes to a dead end"),
    ],
    ids=lambda text: text[:20],
)
def test_grammar_rejects_invalid_text_with_reason(
    text: str, reason: str, demo_vocabulary: Vocabulary, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(GrammarError, match=f"^the grammar {reason}") as error:
        demo_vocabulary.grammar(text).mask_allowed(np.array([5]))
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 250
    assert isinstance(error.value, NGramSpecError)
    assert capfd.readouterr().err == ""


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Vocabulary]:
    """Return the demo model's vocabulary with the marks of all families as control tokens."""
    path = write_vocabulary(tmp_path_factory.mktemp("vocabulary") / "marks.gguf", controls=MARKS)
    with Vocabulary(path) as opened:
        yield opened


def draw_gbnf(draw: st.DrawFn, vocabulary: Vocabulary) -> str:
    """Draw a grammar in GBNF with control tokens, excluded tokens, named plain tokens and a recursive rule."""
    first = vocabulary.controls[MARKS[0]]
    plain = vocabulary.tokenize("the", add_bos=False)[0]
    end = next(filter(vocabulary.is_eog, range(vocabulary.n_vocab)))
    tokens = [f"<[{first + i}]>" for i in range(3)] + [f"!<[{first}]>", f"<[{plain}]>", f"!<[{plain}]>", f"<[{end}]>"]
    texts = ['"a"', '"ab"', '"abc"', '"{\\"name\\": "', "[ab]", "[^a]", '"\\u00e9"', "[0-9]", '""', '("b" more)?']
    parts = st.recursive(
        st.sampled_from(tokens) | st.sampled_from(texts),
        lambda inner: st.one_of(
            st.lists(inner, min_size=2, max_size=4).map(" ".join),
            st.lists(inner, min_size=2, max_size=3).map(lambda options: f"({' | '.join(options)})"),
            st.tuples(inner, st.sampled_from(["*", "+", "?", "{2}", "{0,2}"])).map(
                lambda pair: f"({pair[0]}){pair[1]}"
            ),
        ),
        max_leaves=4,
    )
    root, more = (" ".join(draw(st.lists(parts, min_size=1, max_size=4))) for _ in range(2))
    return f"root ::= {root}\nmore ::= {more}"


def draw_grammar(draw: st.DrawFn, vocabulary: Vocabulary, calls: Sequence[str]) -> str:
    """Draw a grammar: GBNF, a JSON schema, or one of these forced calls."""
    kind = draw(st.sampled_from(["gbnf", "gbnf", "schema", "calls"]))
    if kind == "gbnf":
        return draw_gbnf(draw, vocabulary)
    if kind == "schema":
        return schema_grammar(json.dumps(whole_schema(random.Random(draw(st.integers(0, 10**6))))), strict=False)
    return draw(st.sampled_from(calls))


def advance(vocabulary: Vocabulary, text: str, tokens: list[int]) -> Grammar:
    """Return a grammar that has accepted these tokens and has never looked ahead."""
    grammar = vocabulary.grammar(text)
    for token in tokens:
        grammar.accept(token)
    return grammar


LOOKS: Mapping[str, Callable[[Grammar, int], Any]] = {
    "mask": lambda grammar, token: grammar.mask().tobytes(),
    "allows": lambda grammar, token: [grammar.allows(one) for one in (token, 1, *range(300, 310))],
    "count": lambda grammar, token: grammar.count_allowed([token, token, 300]),
    "forced": lambda grammar, token: grammar.find_forced_text(),
    "complete": lambda grammar, token: grammar.is_complete,
    "shape": lambda grammar, token: GrammarGuide(grammar).shape(Draft((token,)), 20),
}
"""Calls that look ahead, with a token that may come next."""


def look(name: str, grammar: Grammar, token: int) -> Any:
    """Return the result of a call, or the message of its error."""
    try:
        return LOOKS[name](grammar, token)
    except GrammarError as error:
        return str(error)


def find_allowed(grammar: Grammar) -> NDArray[np.bool_]:
    try:
        return grammar.mask()
    except GrammarError:
        return np.zeros(grammar.vocabulary.n_vocab, np.bool_)


@pytest.mark.parametrize("examples", [40, pytest.param(3000, marks=pytest.mark.exhaustive)])
def test_grammar_after_any_calls_matches_grammar_with_same_tokens(vocabulary: Vocabulary, examples: int) -> None:
    """Every call on a grammar that was used before equals that on one that only accepted the same tokens."""
    calls = list(forced_calls(vocabulary.controls))

    @settings(max_examples=examples, deadline=None, derandomize=True, database=None, report_multiple_bugs=False)
    @given(st.composite(draw_grammar)(vocabulary, calls), st.integers(0, 999))
    def check(text: str, seed: int) -> None:
        rng = random.Random(seed)
        try:
            used = vocabulary.grammar(text)
        except GrammarError:
            return  # a random schema that contradicts itself
        tokens: list[int] = []
        for _ in range(8):
            mask = find_allowed(advance(vocabulary, text, tokens))
            token = int(rng.choice(np.flatnonzero(mask))) if mask.any() else 0
            for name in rng.sample([*LOOKS], 4):
                result = look(name, used, token)
                assert result == look(name, advance(vocabulary, text, tokens), token), (text, tokens, name)
                assert name != "allows" or result == mask[[token, 1, *range(300, 310)]].tolist(), (text, tokens)
                if name == "forced" and result:
                    pieces = [vocabulary.piece(one) for one in np.flatnonzero(mask)]
                    assert all(piece.startswith(result) or result.startswith(piece) for piece in pieces), (text, tokens)
            step = rng.choice(["accept", "accept", "roll back", "refuse"])
            if step == "accept" and mask.any():
                used.accept(token)
                tokens.append(token)
            elif step == "roll back" and tokens:
                count = rng.randint(1, len(tokens))
                used.rollback(count)
                del tokens[-count:]
            elif step == "refuse" and not mask.all() and not any(map(vocabulary.is_eog, tokens)):
                with pytest.raises(GrammarError):
                    used.accept(int(np.argmin(mask)))

    check()


@pytest.fixture(scope="module")
def target() -> Iterator[Target]:
    with Target(DEMO, ctx_size=64, threads=1) as target:
        yield target


START, CLOSE = "<|im_start|>", "<|im_end|>"


ANSWER = ("ab", START, "cd", CLOSE)


@pytest.mark.parametrize("shown", [False, True])
@pytest.mark.parametrize(
    ("answer", "stop", "text", "stop_string"),
    [
        (ANSWER, (), f"ab{START}cd", None),
        (ANSWER, (START,), "ab", START),
        (ANSWER, (f"b{START}c",), "a", f"b{START}c"),
        (ANSWER, (f"b{START}x",), f"ab{START}cd", None),
        (ANSWER, (CLOSE,), f"ab{START}cd", CLOSE),
        (ANSWER, (f"d{CLOSE}", "x"), f"ab{START}c", f"d{CLOSE}"),
        (("ab", START, START, CLOSE), (START * 2,), "ab", START * 2),
        ((START, "ab", CLOSE), (START,), "", START),
    ],
)
def test_generate_with_control_token_in_stop_string_ends_before_it(
    target: Target, answer: Sequence[str], stop: Sequence[str], text: str, stop_string: str | None, shown: bool
) -> None:
    """Names of tokens that do not end the text are part of it if the request shows them."""
    names = target.vocabulary.controls
    items = " ".join(f"<[{names[part]}]>" if part in names else f'"{part}"' for part in answer)
    sampling = Sampling(grammar=f"root ::= {items}")
    prompt = target.vocabulary.tokenize("ab")
    decoder = SpeculativeDecoder(target, drafter=None)
    controls = frozenset(names.values()) if shown else frozenset()
    steps = list(decoder.generate(prompt, max_tokens=20, sampling=sampling, stop=stop, controls=controls))
    assert "".join(step.text for step in steps) == (text if shown else text.replace(START, ""))
    assert (steps[-1].stop, steps[-1].stop_string) == ("stop" if stop_string else "eog", stop_string)
