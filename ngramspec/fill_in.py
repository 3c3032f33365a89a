"""A text with a gap in it as a prompt: what stands before and after the gap, and other files of the same project.

Models that fill gaps have tokens that say which part is which (fill in the middle: Bavarian et al. 2022, "Efficient
training of language models to fill in the middle"). What such a model is shown, and continues with what belongs in the
gap:

    <bos> <repo>myproject\\n <sep>a.py\\n... <sep>b.py\\n... <sep>filename\\n <pre>before the gap<suf>after it<mid>

This is the layout of llama-server's `/infill`, with its limits and its words for what no client tells (the names of the
project and of the file), except for `<bos>`: it is the first token, as the model learnt it, while llama-server puts it
between the other files and `<pre>`. What looks like a control token in a text is no control token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Self

from ngramspec.errors import ModelError
from ngramspec.tokens import Tokenizer

_PROJECT, _FILE = "myproject", "filename"
_SNIPPET = "\n\n--- snippet ---\n\n"  # in front of a file, where the model has no token for that


class FillInTokens(NamedTuple):
    """Ids of the tokens that mark the parts; None for each that the vocabulary lacks."""

    prefix: int | None  # in front of what stands before the gap
    suffix: int | None  # in front of what stands after it
    middle: int | None  # in front of what fills it
    project: int | None = None  # in front of the name of a project
    file: int | None = None  # in front of the name of a file


class Limits(NamedTuple):
    """How much of each part is shown, in tokens; None: all of it. What is nearest to the gap stays."""

    before: int | None = None  # of what stands before the gap, without the `prompt`
    after: int | None = None  # of what stands after it, less the tokens of the `prompt`
    others: int | None = None  # of the other files together, with their names and marks

    @classmethod
    def within(cls, n_ctx: int, *, near: int, n_predict: int) -> Self:
        """llama-server's limits: three quarters of `near` before the gap, one after it; other files fill the rest.

        Args:
            n_ctx: most tokens of prompt and answer together.
            near: most tokens that may stand next to the gap, marks included; less where the context is small.
            n_predict: most tokens of the answer. Twice the room is left for it, and at least an eighth of `near`.
        """
        left = max(2 * n_predict, near // 8)
        near = min(near, max(n_ctx - left, n_ctx // 2))
        quarter = near // 4
        return cls(3 * quarter, max(0, quarter - 2), max(0, n_ctx - near - left))


def fill_in(
    tokenizer: Tokenizer,
    before: str,
    after: str,
    *,
    prompt: str = "",
    others: Sequence[tuple[str, str]] = (),
    limits: Limits | None = None,
    suffix_first: bool = False,
) -> list[int]:
    """Token ids of a prompt after which the model says what fills the gap between two texts.

    Args:
        prompt: how the text in the gap begins, or what else stands right before the gap; it is shown whole.
        others: names and texts of other files, or of parts of them, the most important last.
        limits: how much of each is shown; None: all.
        suffix_first: show what stands after the gap first, as Codestral wants it.

    Raises:
        ModelError: the model has no tokens for that.
    """
    marks: Any = getattr(tokenizer, "fill_in_tokens", FillInTokens(None, None, None))
    missing = [name for name in ("prefix", "suffix", "middle") if getattr(marks, name) is None]
    if missing:
        raise ModelError(
            "this model does not support fill-in-the-middle: its vocabulary has no token for"
            f" {', '.join(missing)}; use another one, such as Qwen2.5-Coder"
        )

    limits = limits or Limits()

    def tokens(text: str) -> list[int]:
        return tokenizer.tokenize(text, add_bos=False) if text else []

    around: list[int] = []
    if marks.project is not None:
        around += [marks.project, *tokens(f"{_PROJECT}\n")]
    for name, text in others:
        heading = tokens(_SNIPPET) if marks.file is None else [marks.file, *tokens(f"{name}\n")]
        around += [*heading, *tokens(text)]
    if marks.file is not None:
        around += [marks.file, *tokens(f"{_FILE}\n")]

    begun = tokens(prompt)
    start = [marks.prefix, *_last(tokens(before), limits.before), *begun]
    end = [marks.suffix, *tokens(after)[: None if limits.after is None else max(0, limits.after - len(begun))]]
    bos = tokenizer.tokenize("")[:1]
    near = [*end, *start] if suffix_first else [*start, *end]
    return [*bos, *_last(around, limits.others), *near, marks.middle]


def _last(tokens: list[int], count: int | None) -> list[int]:
    return tokens if count is None else tokens[max(0, len(tokens) - count) :]
