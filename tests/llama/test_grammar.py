"""Grammars: what they allow, and what is said of those that are none. JSON schemas: `test_json_schema`."""

from __future__ import annotations

import random
import re

import numpy as np
import pytest
from support.cli_runner import DEMO
from support.vocabulary_files import END

from ngramspec.cost.given import given_curve
from ngramspec.decoding.decoder import SpeculativeDecoder
from ngramspec.errors import GrammarError, NGramSpecError
from ngramspec.llama.grammar import CANDIDATE, Grammar
from ngramspec.llama.target import Target
from ngramspec.llama.vocabulary import Vocabulary
from ngramspec.sampling.settings import Sampling

LANGUAGE = 'root ::= ("a" "b"? | "c" | "\\u00e9")*'
SENTENCE = re.compile("(ab?|c|\u00e9)*")


def token(vocabulary: Vocabulary, text: str | bytes) -> int:
    raw = text.encode() if isinstance(text, str) else text
    return next(t for t in reversed(range(vocabulary.n_vocab)) if vocabulary.piece(t) == raw)


def allowed(grammar: Grammar) -> set[int]:
    return set(np.flatnonzero(grammar.allowed(np.arange(grammar.vocabulary.n_vocab))).tolist())


def feed(grammar: Grammar, text: str) -> None:
    """Accept a text, checking that it may come."""
    for one in grammar.vocabulary.tokenize(text, add_bos=False):
        assert grammar.allows(one), (text, grammar.vocabulary.piece(one))
        grammar.accept(one)


def ends(grammar: Grammar) -> bool:
    return any(grammar.vocabulary.is_eog(t) for t in allowed(grammar))


def test_allowed_tokens_against_a_regular_expression(word_vocabulary: Vocabulary) -> None:
    """All tokens on random walks through a language whose every start is a sentence, characters of two bytes too."""
    rng = random.Random(1)
    starts = {text.encode()[:i] for text in ("\u00e9", "c") for i in range(3)}

    def sentence(raw: bytes) -> bool:
        for cut in range(len(raw), -1, -1):
            if raw[cut:] in starts and (raw[cut:] == b"" or cut < len(raw)):
                try:
                    return SENTENCE.fullmatch(raw[:cut].decode()) is not None
                except UnicodeDecodeError:
                    continue
        return False

    for _ in range(12):
        grammar, text = word_vocabulary.grammar(LANGUAGE), b""
        for _ in range(8):
            pieces = {t: word_vocabulary.piece(t) for t in range(word_vocabulary.n_vocab)}
            expected = {t for t, piece in pieces.items() if piece and sentence(text + piece)}
            try:
                text.decode()
                expected.add(END)
            except UnicodeDecodeError:
                pass  # in the middle of a character
            found = allowed(grammar)
            assert found == expected, text
            step = rng.choice(sorted(found - {END}))
            grammar.accept(step)
            text += pieces[step]


def test_copies_go_their_own_ways(word_vocabulary: Vocabulary) -> None:
    grammar = word_vocabulary.grammar('root ::= "a" "b" "c"')
    a, b, ab = (token(word_vocabulary, text) for text in ("a", "b", "ab"))
    twin = grammar.copy()
    twin.accept(ab)
    third = twin.copy()
    assert grammar.allows(a)
    assert not twin.allows(a)
    grammar.accept(a)
    assert grammar.allows(b)
    assert not third.allows(b)
    del grammar, twin
    third.accept(token(word_vocabulary, "c"))
    assert ends(third)


def test_forbidding_leaves_the_rest_alone(word_vocabulary: Vocabulary) -> None:
    grammar = word_vocabulary.grammar('root ::= "a"')
    a, b = token(word_vocabulary, "a"), token(word_vocabulary, "b")
    candidates = np.array([(b, 1.5, 0), (a, -2.5, 0), (b, 7.0, 0)], CANDIDATE)
    grammar.forbid(candidates)
    assert candidates["logit"].tolist() == [-np.inf, -2.5, -np.inf]
    assert candidates["id"].tolist() == [b, a, b]
    assert grammar.allowed(np.array([], np.int32)).tolist() == []
    # What is no token is not allowed: llama.cpp would end the process.
    grammar = word_vocabulary.grammar("root ::= .*")
    assert not any(grammar.allows(t) for t in (-1, word_vocabulary.n_vocab, 2**31 - 1))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_target_closed_during_a_generation(temperature: float) -> None:
    """The grammar points into what was freed: where this goes wrong the process ends."""
    target = Target(DEMO, n_ctx=256, threads=1)
    sampling = Sampling(temperature, seed=1, grammar="root ::= [a-z ]{40,}")
    decoder = SpeculativeDecoder(target, exact="off", curve=given_curve({1: 1.0}))
    steps = decoder.generate([5, 6], max_tokens=99, sampling=sampling)
    next(steps)
    next(steps)
    target.close()
    with pytest.raises(ValueError, match=r"^the target is closed$"):
        next(steps)


def test_a_grammar_of_a_closed_vocabulary() -> None:
    vocabulary = Vocabulary(DEMO)
    grammar = vocabulary.grammar('root ::= "a"')
    vocabulary.close()
    for call in (grammar.copy, lambda: grammar.allows(1), lambda: grammar.accept(1)):
        with pytest.raises(ValueError, match=r"^the vocabulary is closed$"):
            call()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("root ::= [a-z", "does not parse: unexpected end of input"),
        ('root ::= "a"\n\nother := "b"\n', r"does not parse: expecting ::= in line 3, at ':= \"b\"'"),
        ("root ::= nowhere\n", "does not parse: Undefined rule identifier 'nowhere'"),
        ('root ::= "a" )', r"does not parse: expecting newline or end in line 1, at '\)'"),
        ('root ::= "a"\nx ::= ("b"\n', "does not parse: expecting '\\)' in line 3"),
        ("root ::= *", r"does not parse: expecting preceding item to \*/\+/\?/{ in line 1"),
        ('root ::= "\\q"', "does not parse: unknown escape in line 1"),
        ('root ::= "\\x4"', "does not parse: expecting 2 hex chars in line 1"),
        ('root ::= "a"{3,2x}', "does not parse: expecting '}' in line 1, at 'x}'"),
        ('root ::= "a"{99999}', "does not parse: number of repetitions exceeds sane defaults"),
        ("{}", "does not parse: expecting name in line 1, at '{}'"),
        ('start ::= "a"', "cannot be used: .*'root'"),
        ("root ::= root root", "'s rule 'root' in line 1 can begin with itself .left recursion"),
        ("root ::= a\na ::= root", "cannot be used: .*left recursion"),
        ('root ::= "<a" [<!] # <!\n  !<[5]>*', "names tokens in line 2: llama.cpp may end the process"),
        ("root ::= <think>", "names tokens in line 1"),
        ("# nothing but a comment\n", "cannot be used: failed to parse grammar"),
        (" \n", "cannot be used: failed to parse grammar"),
        ("", "is empty: it has no rule named root"),
        ('root ::= "a"\0', "holds a NUL character"),
        ('root ::= "\udc80"', "does not parse: character 10 of it is not valid text"),
        ('root ::=\n("a" ' + "(" * 100_000, "nested more than 2500 brackets deep in line 2"),
    ],
    ids=lambda text: text[:20],
)
def test_texts_that_are_no_grammar(
    text: str, reason: str, demo_vocabulary: Vocabulary, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(GrammarError, match=f"^the grammar ?(is )?{reason}") as error:
        demo_vocabulary.grammar(text)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 250
    assert isinstance(error.value, NGramSpecError)
    assert capfd.readouterr().err == ""  # where llama.cpp prints the whole grammar


def test_brackets_in_texts_are_no_brackets(demo_vocabulary: Vocabulary) -> None:
    many = "(" * 3000
    grammar = demo_vocabulary.grammar(f'# {many}\nroot ::= [(] "{many}" [^"(\\]] # {many}')
    feed(grammar, "((((")
    feed(demo_vocabulary.grammar("root ::= " + "(" * 2000 + '"a"' + ")" * 2000), "a")


@pytest.mark.parametrize("text", ['root ::= "a" []', 'root ::= "a" "\\x00"', 'root ::= "a" [z-a]'])
def test_grammars_that_nothing_satisfies(text: str, demo_vocabulary: Vocabulary) -> None:
    grammar = demo_vocabulary.grammar(text)
    feed(grammar, "a")
    assert not allowed(grammar) or text.endswith("[]")  # an empty class is no character at all
