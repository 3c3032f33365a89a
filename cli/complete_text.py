"""Input of `ngramspec complete`: one text, or the texts before and after a gap."""

from __future__ import annotations

from errno import EINVAL, ENAMETOOLONG, ENOENT, ENOTDIR

from ngramspec.fill_in import Limits, fill_in
from ngramspec.llama.target import Target

from .console import fail, note, read_source, usage_error

_NO_SUCH_NAME = frozenset({ENOENT, ENOTDIR, ENAMETOOLONG, EINVAL})

MAX_NAME = 80
"""Maximum number of characters of a file's name in an error message."""

LARGE = 1 << 20
"""Maximum number of characters that are tokenized as a whole.

Texts of this length take at most two seconds, while 30 MB would take a minute.
"""


def read_texts(source: str, suffix: str | None, prompt: str | None = None) -> tuple[str, str | None]:
    """Read the text to continue and the text after the gap; `None` means no gap, and the name "-" stdin.

    `prompt` replaces the text of `source`. The program ends if a text is not UTF-8 or all texts are empty.
    """
    if suffix is not None and suffix == source and prompt is None:
        usage_error(
            f"the text and --suffix must be different files, got {'stdin' if source == '-' else source} for both"
        )
    if suffix == "":
        usage_error("the name of the --suffix file must not be empty")
    before = _read(source) if prompt is None else prompt
    if suffix is None:
        if not before:
            name = "-p/--prompt" if prompt is not None else "standard input" if source == "-" else source
            fail(f"{name} is empty: there is no text to continue")
        return before, None
    after = read_source(suffix, "no text after the gap; name a file or pipe one in")
    if not before and not after:
        fail("the texts before and after the gap are empty")
    return before, after


def _read(source: str) -> str:
    """Read the text to continue; an error in the name of its file shows how to pass a text itself."""
    try:
        return read_source(source, "no text to continue; pipe one in, name a file or set -p/--prompt")
    except OSError as error:
        if error.errno not in _NO_SUCH_NAME:
            raise
        name = source if len(source) <= MAX_NAME else f"{source[:MAX_NAME]}..."
        fail(f"{name}: {error.strerror}; to continue a text itself, use -p/--prompt TEXT")


def make_prompt(target: Target, before: str, after: str | None, limit: int, truncate: bool) -> list[int]:
    """Return the prompt tokens; the program ends if they leave no room for an answer."""
    length = len(before) + len(after or "")
    if length >= LARGE:
        # The cut may change the first tokens of a text, so the limit is twice the number of characters that fit.
        max_chars = 2 * target.n_ctx * target.vocabulary.longest_token
        before, after = before[-max_chars:], None if after is None else after[:max_chars]
    left_out = len(before) + len(after or "") < length
    prompt: list[int] = []
    if truncate or not left_out:
        prompt = target.vocabulary.tokenize(before) if after is None else fill_in(target.vocabulary, before, after)
    if len(prompt) < target.n_ctx and not left_out:
        return prompt
    size = f"more than {target.n_ctx}" if left_out else str(len(prompt))
    if not truncate:
        part = "its end" if after is None else "the parts next to the gap"
        fail(
            f"the text has {size} tokens and leaves no room for an answer in the context of {target.n_ctx};"
            f" raise -c/--ctx-size, or keep only {part} with --truncate"
        )
    n_kept = target.n_ctx - min(limit, target.n_ctx // 2)
    if after is None:
        note(f"warning: the text has {size} tokens; only the last {n_kept} are used")
        # Keep the token that the model requires at the start of every text.
        bos = target.vocabulary.tokenize("")[:1]
        bos = bos if bos == prompt[:1] else []
        return bos + prompt[len(bos) - n_kept :]
    return _cut_around_gap(target, before, after, n_kept)


def _cut_around_gap(target: Target, before: str, after: str, n_kept: int) -> list[int]:
    """Return a prompt of `n_kept` tokens with three quarters of the text before the gap and one quarter after it.

    One side gets the tokens that the other side does not need.
    """
    room = n_kept - len(fill_in(target.vocabulary, "", ""))
    sizes = [len(target.vocabulary.tokenize(text, add_bos=False)) for text in (before, after)]
    n_after = min(sizes[1], max(room // 4, room - sizes[0]))
    note(
        f"warning: the texts have {sum(sizes)} tokens; only {room - n_after} before the gap and {n_after} after it"
        " are used"
    )
    return fill_in(target.vocabulary, before, after, limits=Limits(room - n_after, n_after))
