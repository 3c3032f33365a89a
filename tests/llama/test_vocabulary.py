"""Tests of `Vocabulary`: the tokenizer of a file with or without weights, and those that a draft model may have."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import gguf
import pytest
from support.cli_runner import DEMO
from support.model_files import FIRST_WORD, WORDS, write_gguf, write_model, write_vocabulary, write_words

from ngramspec.chat.stream import Tool
from ngramspec.data import ModelError
from ngramspec.llama.chat_format import builtin_names
from ngramspec.llama.target import Target
from ngramspec.llama.vocabulary import Vocabulary, common_tokens
from ngramspec.models.check import check_complete

TEXT = "<|im_start|>user\nGrüße, 漢字!<|im_end|>\n"


def test_vocabulary_of_file_without_weights_tokenizes_like_the_model(tmp_path: Path) -> None:
    path = write_vocabulary(tmp_path / "vocab.gguf")
    check_complete(path)
    with Vocabulary(path) as alone, Vocabulary(DEMO) as of_model, Target(DEMO, ctx_size=64, threads=1) as target:
        for special in (True, False):
            tokens = target.vocabulary.tokenize(TEXT, special=special)
            assert alone.tokenize(TEXT, special=special) == of_model.tokenize(TEXT, special=special) == tokens
            assert [alone.piece(t) for t in tokens] == [target.vocabulary.piece(t) for t in tokens]
        assert (
            alone.end_of_turn
            == target.vocabulary.end_of_turn
            == target.vocabulary.tokenize("<|im_end|>", special=True)[-1]
        )
        assert alone.is_eog(alone.end_of_turn)
        assert alone.n_vocab == target.vocabulary.n_vocab
        messages = [{"role": "user", "content": "hello"}]
        assert alone.chats.tokens(messages) == target.vocabulary.chats.tokens(messages)
    unused = Vocabulary(path)
    unused.close()
    for use in (lambda: alone.tokenize("a"), lambda: unused.tokenize("a"), lambda: unused.controls):
        with pytest.raises(ValueError, match="the vocabulary is closed"):
            use()


def test_vocabulary_tokenize_round_trips_text(demo_vocabulary: Vocabulary, tmp_path: Path) -> None:
    demo = demo_vocabulary
    texts = ["", "hello", "a\nb\t c", "naïve café", "漢字 😀👨‍👩‍👧", "x\0y", "\u200b\ufeff", "  spaces  "]
    texts.append("word " * 5000)
    with Vocabulary(write_model(tmp_path / "tiny.gguf", "llama")) as tiny:
        for text in texts:
            for vocabulary in (demo, tiny):
                tokens = vocabulary.tokenize(text, add_bos=False)
                assert all(0 <= t < vocabulary.n_vocab for t in tokens)
                back = b"".join(map(vocabulary.piece, tokens)).decode()
                assert back in (text, " " + text)  # sentencepiece puts a space in front
            assert (demo.tokenize(text) != demo.tokenize(text, add_bos=False)) <= bool(demo.tokenize(""))
    assert len(demo.tokenize("a\ud800b")) >= 2  # not valid Unicode


def test_vocabulary_piece_is_empty_for_control_tokens(demo_vocabulary: Vocabulary) -> None:
    demo = demo_vocabulary
    plain = demo.tokenize("<|im_end|>", add_bos=False)
    (end,) = demo.tokenize("<|im_end|>", special=True, add_bos=False)
    assert demo.is_eog(end)
    assert demo.piece(end) == b""
    assert b"".join(map(demo.piece, plain)).strip() == b"<|im_end|>"
    assert not any(map(demo.is_eog, plain))
    assert sum(bool(demo.piece(t)) for t in range(demo.n_vocab)) > 0.95 * demo.n_vocab
    for wrong in (-1, demo.n_vocab):
        with pytest.raises(ValueError, match=str(demo.n_vocab)):
            demo.piece(wrong)


def test_vocabulary_rejects_unknown_architecture(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"broken\.gguf"):
        Vocabulary(write_gguf(tmp_path / "broken.gguf", architecture="unheard-of"))


TALK = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Yes?"},
    {"role": "user", "content": "Bye"},
]
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"


def test_vocabulary_chat_uses_template_of_file_or_chatml(tmp_path: Path) -> None:
    """A template that writes the BOS itself gets no second one; without a template, ChatML applies."""

    def opened(template: str | None) -> Vocabulary:
        return Vocabulary(write_model(tmp_path / "model.gguf", "llama", chat_template=template))

    for template in (TEMPLATE, "{{ bos_token }}" + TEMPLATE):
        with opened(template) as own:
            assert own.chat_template == template
            assert own.chats.tokens(TALK) == own.tokenize("<user>Hi<assistant>Yes?<user>Bye")
            assert own.chats.tokens(TALK).count(1) == 1
    with opened(None) as bare:
        assert bare.chat_template is None
        text = b"".join(map(bare.piece, bare.chats.tokens(TALK))).decode()
        assert "user\nHi" in text
        assert text.endswith("assistant\n")
    with opened("{{ raise_exception('no') }}") as refusing, pytest.raises(ModelError, match="rejects"):
        refusing.chats.tokens(TALK)


LONG_TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "a <|im_end|> " + "é" * 1000},
    {"role": "assistant", "content": "b"},
    {"role": "user", "content": "c"},
]


@pytest.fixture
def vocabulary() -> Iterator[Vocabulary]:
    """Yield the demo model's vocabulary for a test that changes it."""
    with Vocabulary(DEMO) as opened:
        yield opened


def test_builtin_chatml_equals_template_of_demo_model(vocabulary: Vocabulary, demo_vocabulary: Vocabulary) -> None:
    vocabulary.use_chat_template("chatml")
    for answered in (True, False):
        prompt = vocabulary.chats.prompt(LONG_TALK, answered=answered)
        assert prompt == demo_vocabulary.chats.prompt(LONG_TALK, answered=answered)
    assert prompt.tokens.count(vocabulary.controls["<|im_end|>"]) == 4  # The marker in the message is text.


def test_builtin_templates_format_a_conversation(vocabulary: Vocabulary) -> None:
    assert {"llama3", "gemma", "mistral-v7"} < {*builtin_names()}
    for name in builtin_names():
        vocabulary.use_chat_template(name)
        text = vocabulary.chats.prompt(LONG_TALK, [Tool("clock", "Tells the time.")]).text
        assert text.index("Be brief.") < text.index('"name": "clock"') < text.index("é" * 1000), name
    assert vocabulary.chats.capabilities["supports_tools"] is False


def test_builtin_template_rejects_null_character(vocabulary: Vocabulary) -> None:
    vocabulary.use_chat_template("llama3")
    with pytest.raises(ModelError, match="without null characters"):
        vocabulary.chats.prompt([{"role": "user", "content": "a\0b"}])


MARKS = dict.fromkeys(("<|start|>", "<|turn|>", "[INST]"), gguf.TokenType.USER_DEFINED)
ORDINARY = dict.fromkeys(("<b>", "   ", "[note]"), gguf.TokenType.USER_DEFINED)
MARKED = (
    "{% for m in messages %}<|start|>{{ m.role }}[INST]\n{{ m.content }}<|turn|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant[INST]\n{% endif %}"
)


@pytest.fixture(scope="module", params=["demo", "SentencePiece", "SentencePiece without prefix"])
def marked_vocabulary(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Vocabulary:
    """Vocabularies whose control tokens have the type "user-defined", as those of gpt-oss."""
    path, tokens = tmp_path_factory.mktemp("marked") / "vocabulary.gguf", MARKS | ORDINARY
    if request.param == "demo":
        vocabulary = Vocabulary(write_vocabulary(path, controls=[*tokens], kind=gguf.TokenType.USER_DEFINED))
    else:
        space_prefix = request.param == "SentencePiece"
        vocabulary = Vocabulary(write_words(path, [*WORDS, " "], controls=tokens, space_prefix=space_prefix))
    vocabulary.use_chat_template(MARKED)
    return vocabulary


def read(vocabulary: Vocabulary, tokens: list[int]) -> str:
    return b"".join(map(vocabulary.display_piece, tokens)).decode()


@pytest.mark.parametrize(
    "text",
    [
        *("hi<|turn|><|start|>system[INST]a", "<|turn|>", " <|turn|> a", "<|start|>\n<|turn|>", "<|turn|>\x01b"),
        *("<|turn|>" * 3, "<|turn|> <b>a</b>   [note]", "<|<|turn|>turn|>", "", "<|en"),
    ],
)
def test_tokenize_names_of_user_defined_control_tokens_are_text(marked_vocabulary: Vocabulary, text: str) -> None:
    vocabulary = marked_vocabulary
    ids = {vocabulary.tokenize(name, special=True, add_bos=False)[-1]: name for name in MARKS | ORDINARY}
    for add_bos in (True, False):
        tokens = vocabulary.tokenize(text, add_bos=add_bos)
        start = read(vocabulary, vocabulary.tokenize("", add_bos=add_bos))
        prefix = read(vocabulary, vocabulary.tokenize("a", add_bos=False)).removesuffix("a") if text else ""
        found = [ids[token] for token in tokens if token in ids]
        assert found == [name for name in ORDINARY if name in text]
        # SentencePiece adds a space after each special token, too.
        assert read(vocabulary, tokens) == start + prefix + text.replace("<b>a", f"<b>{prefix}a")


@pytest.mark.parametrize("text", ["a", " a", "ab true", "\nb", "b<b>c", ""])
def test_continue_answer_equals_tokens_of_whole_text(marked_vocabulary: Vocabulary, text: str) -> None:
    vocabulary = marked_vocabulary
    for content in ("ab", "b\n", " 12 <b> "):
        prompt = vocabulary.chats.prompt([{"role": "user", "content": content}])
        assert prompt.tokens == vocabulary.tokenize(prompt.text, special=True)
        answer = vocabulary.chats.continue_answer(prompt, "", text)
        assert answer.text == prompt.text + text
        assert answer.tokens == vocabulary.tokenize(answer.text, special=True)


def test_continue_answer_with_name_of_control_token_keeps_it_as_text(marked_vocabulary: Vocabulary) -> None:
    vocabulary = marked_vocabulary
    marks = {vocabulary.tokenize(name, special=True, add_bos=False)[-1] for name in MARKS}
    messages = [{"role": "user", "content": "a"}]
    usual = vocabulary.chats.continue_answer(vocabulary.chats.prompt(messages), "", "ab")
    prompt = vocabulary.chats.continue_answer(vocabulary.chats.prompt(messages), "", "a<|turn|>b")
    assert [token for token in prompt.tokens if token in marks] == [token for token in usual.tokens if token in marks]
    assert read(vocabulary, prompt.tokens) == read(vocabulary, usual.tokens).removesuffix("b") + "<|turn|>b"


@pytest.mark.parametrize(
    ("name", "ids", "template", "is_control"),
    [
        ("EOA", {"tokenizer.ggml.eot_token_id": 4096}, MARKED, True),
        ("EOA", {"tokenizer.ggml.fim_pre_token_id": 4096}, MARKED, True),
        ("EOA", {}, f"{MARKED}EOA", False),
        ("<|tool_call>", {}, MARKED, True),
        ("[INST]", {}, MARKED, True),
        ("[INST]", {}, "chatml", False),
        ("[INST]", {}, "llama2", True),
        ("<td>", {}, MARKED, False),
        ("\n\n\n\n", {}, f"{MARKED}\n\n\n\n", False),
        ("|>", {}, MARKED, False),
    ],
)
def test_user_defined_token_with_role_or_mark_is_control_token(
    tmp_path: Path, name: str, ids: dict[str, int], template: str, is_control: bool
) -> None:
    path = write_vocabulary(tmp_path / "v.gguf", controls=[name], kind=gguf.TokenType.USER_DEFINED, ids=ids)
    with Vocabulary(path) as vocabulary:
        vocabulary.use_chat_template(template)
        (token,) = vocabulary.tokenize(name, special=True, add_bos=False)
        tokens = vocabulary.tokenize(name, add_bos=False)
        assert (token not in tokens) == is_control
        assert read(vocabulary, tokens) == name


ALL = FIRST_WORD + len(WORDS)


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "padded": {"padding": 3},
    "longer padded": {"padding": 9},
    "another word": {"words": [*WORDS[:4], "zz", *WORDS[5:]]},
    "control": {"kind": gguf.TokenType.CONTROL},
    "more": {"words": [*WORDS, "more"]},
}


@pytest.fixture(scope="module")
def vocabularies(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Vocabulary]]:
    folder = tmp_path_factory.mktemp("vocabularies")
    with ExitStack() as opened:
        yield {
            name: opened.enter_context(Vocabulary(write_words(folder / f"{name}.gguf", **{"words": WORDS, **options})))
            for name, options in VARIANTS.items()
        }


def test_common_tokens_ignores_padding_at_end_of_vocabulary(vocabularies: dict[str, Vocabulary]) -> None:
    for target, draft, count in (
        ("plain", "plain", ALL),
        ("plain", "padded", ALL),
        ("longer padded", "plain", ALL),
        ("padded", "longer padded", ALL + 3),
    ):
        assert common_tokens(vocabularies[target], vocabularies[draft]) == count


@pytest.mark.parametrize(
    ("target", "draft", "said"),
    [
        ("plain", "another word", (f"at token {FIRST_WORD + 4}", "'bc' (normal)", "'zz' (normal)")),
        ("plain", "control", (f"at token {FIRST_WORD}", "'a' (normal)", "'a' (control)")),
        (
            "more",
            "plain",
            (f"at token {ALL} of {ALL + 1} and {ALL}", "'more' (normal) and, in the draft model, missing"),
        ),
        (
            "plain",
            "more",
            (f"at token {ALL} of {ALL} and {ALL + 1}", "missing and, in the draft model, 'more' (normal)"),
        ),
        ("more", "padded", (f"at token {ALL}", "'more' (normal)", "'[PAD0]' (unused)")),
    ],
)
def test_common_tokens_with_different_vocabularies_names_first_difference(
    target: str, draft: str, said: Sequence[str], vocabularies: dict[str, Vocabulary]
) -> None:
    with pytest.raises(ModelError, match="cannot draft for") as refused:
        common_tokens(vocabularies[target], vocabularies[draft])
    message = str(refused.value)
    assert all(part in message for part in (*said, f"{draft}.gguf cannot", f"{target}.gguf: their"))
    assert "\n" not in message
