"""Tests of `GrammarGuide`: drafts end before a token that the grammar forbids, and continue with forced tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

import pytest

from ngramspec.drafting.draft import NO_DRAFT, Draft
from ngramspec.drafting.grammar import GrammarGuide
from ngramspec.grammars.json_schema import schema_grammar
from ngramspec.llama.vocabulary import Vocabulary

KEYS = schema_grammar('{"type":"object","properties":{"name":{"type":"boolean"}},"required":["name"]}')


def spell(vocabulary: Vocabulary, text: str) -> tuple[int, ...]:
    return tuple(vocabulary.tokenize(text, add_bos=False))


def say(vocabulary: Vocabulary, draft: Draft) -> str:
    return b"".join(map(vocabulary.piece, draft.tokens)).decode()


def rich(tokens: Sequence[int]) -> Draft:
    n = len(tokens)
    return Draft(tuple(tokens), tuple({t: 0.5, 5: 0.5} for t in tokens), (3,) * n, (9,) * n, (0.7,) * n, "ngram")


def guide(vocabulary: Vocabulary, grammar: str, done: str = "") -> GrammarGuide:
    made = GrammarGuide(vocabulary.grammar(grammar))
    for token in spell(vocabulary, done):
        assert made.grammar.allows(token)
        made.grammar.accept(token)
    return made


def check_shape(draft: Draft) -> None:
    for field in fields(draft):
        value = getattr(draft, field.name)
        if field.name not in ("tokens", "source", "repeats", "entropy"):
            assert len(value) in (0, len(draft.tokens)), field.name
    for token, law in zip(draft.tokens, draft.q, strict=False):
        assert law[token] > 0
        assert sum(law.values()) == pytest.approx(1)


def test_grammar_guide_truncates_draft_before_forbidden_token(demo_vocabulary: Vocabulary) -> None:
    some = spell(demo_vocabulary, "some")
    made = guide(demo_vocabulary, "root ::= [a-z]+")
    assert made.shape(rich(spell(demo_vocabulary, "some text")), 10) == rich(some)
    assert made.shape(rich(some), 10) == rich(some)
    assert guide(demo_vocabulary, "root ::= [0-9]+").shape(rich(spell(demo_vocabulary, "text")), 10).tokens == ()
    assert made.legal(NO_DRAFT) == 0
    assert made.legal(rich([*some, 7])) == len(some)
    assert made.legal(rich([demo_vocabulary.n_vocab])) == made.legal(rich([-1])) == 0


@pytest.mark.parametrize("fixed_length", [False, True])
def test_grammar_guide_drafts_forced_text(demo_vocabulary: Vocabulary, fixed_length: bool) -> None:
    made = guide(demo_vocabulary, 'root ::= "{\\"name\\": " [0-9]+')
    shaped = made.shape(NO_DRAFT, 50, fixed_length=fixed_length)
    assert say(demo_vocabulary, shaped) == '{"name": '
    assert shaped.source == "grammar"
    assert all(q == {t: 1.0} for t, q in zip(shaped.tokens, shaped.q, strict=True))
    assert len(shaped.acceptance_probs) == len(shaped)
    check_shape(shaped)
    assert made.shape(NO_DRAFT, 2, fixed_length=fixed_length).tokens == shaped.tokens[:2]


def test_grammar_guide_appends_forced_text_to_truncated_draft(demo_vocabulary: Vocabulary) -> None:
    made = guide(demo_vocabulary, KEYS, "{")
    draft = rich(spell(demo_vocabulary, '"na'))
    shaped = made.shape(draft, 50)
    assert say(demo_vocabulary, shaped).startswith('"name"')
    assert shaped.source == "ngram+grammar"
    assert shaped.q[: len(draft)] == draft.q
    check_shape(shaped)
    for empty in (draft.head(0), Draft(draft.tokens, source="suffix"), Draft(draft.tokens, (), (3,) * len(draft))):
        check_shape(made.shape(empty, 50))
    assert made.shape(draft, len(draft)) == draft


def test_grammar_guide_with_fixed_length_keeps_or_replaces_whole_draft(demo_vocabulary: Vocabulary) -> None:
    """Whether a drawn token is in the draft must not depend on the token."""
    draft = rich(spell(demo_vocabulary, "no 1"))
    assert guide(demo_vocabulary, "root ::= [a-z]+").shape(draft, 9, fixed_length=True) is draft
    for tokens in ("yes", "no", "ye"):
        shaped = guide(demo_vocabulary, 'root ::= "yes"').shape(
            rich(spell(demo_vocabulary, tokens)), 9, fixed_length=True
        )
        assert say(demo_vocabulary, shaped) == "yes"
        assert shaped.source == "grammar"


def test_grammar_guide_forces_no_end_token_and_keeps_position(demo_vocabulary: Vocabulary) -> None:
    """Nothing follows the end of a text, so a draft of it saves nothing."""
    for grammar in ('root ::= "yes"', 'root ::= "yes" "no"?'):
        made = guide(demo_vocabulary, grammar)
        for _ in range(3):
            assert say(demo_vocabulary, made.shape(NO_DRAFT, 9)) == "yes"
            assert made.legal(rich(spell(demo_vocabulary, "yes"))) == len(spell(demo_vocabulary, "yes"))
        assert made.legal(rich(spell(demo_vocabulary, "no"))) == 0
        assert guide(demo_vocabulary, grammar, "yes").shape(NO_DRAFT, 9) == NO_DRAFT


def test_grammar_guide_learns_acceptance_rates(demo_vocabulary: Vocabulary) -> None:
    made = guide(demo_vocabulary, 'root ::= "{\\"name\\": " [0-9]+')
    before = made.shape(NO_DRAFT, 50)
    n = len(before)
    assert n > 2
    for _ in range(30):
        made.shape(NO_DRAFT, 50)
        made.learn(n, n - 1, ())  # All tokens except the last were correct.
    after = made.shape(NO_DRAFT, 50).acceptance_probs
    assert after[-1] < 0.1 < before.acceptance_probs[-1]
    assert after[0] > 0.97 > before.acceptance_probs[0]
    for _ in range(30):
        made.shape(NO_DRAFT, 50)
        made.learn(0, 0, ())  # No token was sent, so the guide learns nothing.
    assert made.shape(NO_DRAFT, 50).acceptance_probs == after
    for _ in range(300):
        made.shape(NO_DRAFT, 50)
        made.learn(n, 0, ())  # Tokens after a refusal were not tested.
    assert made.shape(NO_DRAFT, 50).acceptance_probs[-1] == after[-1]
    assert made.shape(NO_DRAFT, 50).acceptance_probs[0] < 0.3


def test_grammar_guide_with_leading_space_vocabulary_drafts_forced_text(word_vocabulary: Vocabulary) -> None:
    assert word_vocabulary.piece(word_vocabulary.tokenize("a", add_bos=False)[0]) == b" a"
    shaped = guide(word_vocabulary, 'root ::= "abc" [0-9]').shape(NO_DRAFT, 9)
    assert say(word_vocabulary, shaped) == "abc"


def test_grammar_guide_limits_forced_text_to_whole_characters(demo_vocabulary: Vocabulary) -> None:
    """Forced text consists of whole characters, and its length is limited."""
    long = "\u00e9a" * 200
    grammars = {'"a\u00e9b"': "a\u00e9b", "[\u00e0-\u00ff]+": "", f'"{long}"': long.encode()[:126].decode()}
    for text, forced in grammars.items():
        shaped = guide(demo_vocabulary, f"root ::= {text}").shape(NO_DRAFT, 1000)
        assert say(demo_vocabulary, shaped) == forced


def test_grammar_guide_drafts_white_space_as_in_earlier_text(demo_vocabulary: Vocabulary) -> None:
    """JSON allows optional white space; the guide expects the text to continue as it began."""
    item = '{"type":"object","properties":{"k":{"type":"integer"}},"required":["k"]}'
    grammar = schema_grammar('{"type":"array","items":' + item + "}")

    def drafted(done: str) -> str:
        made = guide(demo_vocabulary, grammar)
        for token in spell(demo_vocabulary, done):
            assert made.grammar.allows(token)
            made.grammar.accept(token)
            made.learn(0, 0, (token,))
        return say(demo_vocabulary, made.shape(NO_DRAFT, 50))

    spaced, tight = '[{"k": 1}, {"k": 2}, {', '[{"k":1},{"k":2},{'
    assert drafted(spaced).startswith('"k": ')
    assert drafted(tight).startswith('"k":')
    assert " " not in drafted(tight)
