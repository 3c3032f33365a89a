"""Prompts for fill-in-the-middle: the prefix, the suffix and other files of the same project.

Models that support it have tokens that mark these parts (Bavarian et al. 2022, "Efficient training of language models
to fill in the middle"). The model continues the following prompt with the text of the middle:

    <bos> <repo>myproject\\n <sep>a.py\\n... <sep>b.py\\n... <sep>filename\\n <pre>before the gap<suf>after it<mid>

This is the layout of llama-server's `/infill`, with its limits. Clients do not send the names of the project and of the
file, so the prompt contains the same names as in llama-server. Only `<bos>` differs: here it is the first token, as in
training, while llama-server puts it between the other files and `<pre>`. The tokenizer does not parse control tokens in
the texts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Self

from ngramspec.backend import Vocabulary
from ngramspec.data import ModelError


class Limits(NamedTuple):
    """Maximum number of tokens of each part; `None` means all. Tokens far from the middle are cut."""

    before: int | None = None  # limit of the prefix, without the `prompt`
    after: int | None = None  # limit of the suffix, from which the tokens of the `prompt` are subtracted
    other_files: int | None = None  # limit of all other files together, with their names and marks

    @classmethod
    def for_context(cls, n_ctx: int, *, near: int, n_predict: int) -> Self:
        """Return llama-server's limits: 3/4 of `near` are prefix and 1/4 is suffix; other files fill the rest."""
        reserve = max(2 * n_predict, near // 8)
        near = min(near, max(n_ctx - reserve, n_ctx // 2))
        quarter = near // 4
        return cls(3 * quarter, max(0, quarter - 2), max(0, n_ctx - near - reserve))


def fill_in(
    vocabulary: Vocabulary,
    before: str,
    after: str,
    *,
    prompt: str = "",
    other_files: Sequence[tuple[str, str]] = (),
    limits: Limits | None = None,
    suffix_first: bool = False,
) -> list[int]:
    """Return the token ids of a prompt that the model continues with the middle between two texts.

    A ModelError means that the vocabulary has no tokens for it. `prompt` is the beginning of the middle, or other text
    right before it, and is never cut. `other_files` are names and texts of files, or of parts of them, the most
    important last. `suffix_first` puts the suffix before the prefix, as Codestral requires.
    """
    marks = vocabulary.fill_in_tokens
    if marks.prefix is None or marks.suffix is None or marks.middle is None:
        missing = [name for name, token in zip(marks._fields[:3], marks, strict=False) if token is None]
        raise ModelError(
            "this model does not support fill-in-the-middle: its vocabulary has no token for"
            f" {', '.join(missing)}; use another one, such as Qwen2.5-Coder"
        )

    limits = limits or Limits()

    def tokens(text: str) -> list[int]:
        return vocabulary.tokenize(text, add_bos=False) if text else []

    around: list[int] = []
    if marks.project is not None:
        around += [marks.project, *tokens("myproject\n")]
    for name, text in other_files:
        heading = tokens("\n\n--- snippet ---\n\n") if marks.file is None else [marks.file, *tokens(f"{name}\n")]
        around += [*heading, *tokens(text)]
    if marks.file is not None:
        around += [marks.file, *tokens("filename\n")]

    prompt_tokens = tokens(prompt)
    start = [marks.prefix, *_last(tokens(before), limits.before), *prompt_tokens]
    end = [marks.suffix, *tokens(after)[: None if limits.after is None else max(0, limits.after - len(prompt_tokens))]]
    bos = vocabulary.tokenize("")[:1]
    near = [*end, *start] if suffix_first else [*start, *end]
    return [*bos, *_last(around, limits.other_files), *near, marks.middle]


def _last(tokens: list[int], count: int | None) -> list[int]:
    return tokens if count is None else tokens[max(0, len(tokens) - count) :]
