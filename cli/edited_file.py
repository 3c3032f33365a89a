"""The new file in an answer of a model, without the code fence and the words around it, and with its line ends."""

from __future__ import annotations

import re
import shutil
from codecs import BOM_UTF8
from collections import Counter
from collections.abc import Iterator, Sequence
from difflib import SequenceMatcher, unified_diff
from itertools import islice
from pathlib import Path

from ngramspec.storage import atomic_path

_LINE = re.compile(r"[^\n]*\n|[^\n]+")
_WORD = re.compile(r"\w+|[^\w\s]+")
_MAX_FENCES = 8  # fences of a new file, in addition to those of the original
_FENCE = re.compile(r" {0,3}(`{3,}(?=[^`]*$)|~{3,})[ \t]*(.*?)\s*$")  # characters of a code fence, and its language


def find_file(answer: str, original: str) -> str | None:
    """Return the new file in an answer, without the code fence and the words around it; `None` if it has none.

    Without a fence, the answer is the file if it begins and ends with lines of the original and has half of its words.

    A file may contain fences itself, even of the length of the one around it. So a block ends at the fence that makes
    it most similar to the original, or, if the original has none, at the first one that can close it. If there are
    several blocks, the file is the one that has most words in common with the original, but not the original itself,
    which models repeat before they change it. If the original has fences and much in common with the text around that
    block, its fence is not the one around the file.
    """
    lines, old_lines = split_lines(answer.replace("\r\n", "\n")), split_lines(original)
    old_words = Counter(_WORD.findall(original))

    def n_common(block: Sequence[str]) -> int:
        return (Counter(_WORD.findall("".join(block))) & old_words).total()

    def similarity(end: int) -> float:
        block = lines[start:end]
        return n_common(block) / (1 + len(_WORD.findall("".join(block))) + old_words.total())

    texts, old_texts = ([line.strip() for line in each if line.strip()] for each in (lines, old_lines))
    if texts and not _FENCE.match(texts[0]) and {texts[0], texts[-1]} <= {*old_texts}:
        return "".join(lines).lstrip("\n") if 2 * n_common(lines) >= old_words.total() else None

    n_fences = sum(map(bool, map(_FENCE.match, old_lines)))
    blocks, start = list[list[str]](), 0
    while start < len(lines):
        opening = _FENCE.match(lines[start])
        start += 1
        if opening:
            second = _FENCE.match(lines[start]) if start < len(lines) and not n_fences else None
            if second and second[2] and second[1] == opening[1] and opening[2] in ("", second[2]):
                start += 1  # models may open a block twice
            closing = (i for i in range(start, len(lines)) if _closes(lines[i], opening[1]))
            ends = [*islice(closing, n_fences + _MAX_FENCES)]
            if not ends or (n_fences and len(ends) < n_fences + _MAX_FENCES):
                ends.append(len(lines))  # the answer may also end without a closing fence
            paired = [i for i in ends if _has_paired_fences(lines[start:i]) == _has_paired_fences(old_lines)]
            end = max(paired or ends, key=similarity) if n_fences else (paired or ends)[0]
            blocks.append(lines[start:end])
            start = end + 1
    most = max(map(n_common, blocks), default=0)
    candidates = [block for block in blocks if 2 * n_common(block) >= most]
    candidates = [block for block in candidates if "".join(block).strip() != original.strip()] or candidates
    new = max(candidates, key=lambda block: (n_common(block), len(block)), default=[])
    if n_fences and 3 * n_common(new) < 2 * n_common(lines):
        return None
    return "".join(new) if any(map(str.strip, new)) else None


def is_complete(original: str, answer: str, start: int) -> bool:
    """Return True if an answer contains the whole new file, and only words can follow.

    This is known of a closed fence with most words of the original, if the original itself has no fences. The lines
    from `start` on are new: without a fence in them, nothing has changed.
    """
    if not any(map(_FENCE.match, split_lines(answer[start:]))):
        return False
    fences = [line for line in split_lines(answer) if line.endswith("\n") and _FENCE.match(line)]
    if not fences or len(fences) % 2 or any(map(_FENCE.match, split_lines(original))):
        return False
    new, words = find_file(answer, original) or "", _WORD.findall(original)
    n_common = (Counter(_WORD.findall(new)) & Counter(words)).total()
    return new.strip() != original.strip() and 5 * n_common >= 4 * len(words)


def split_lines(text: str) -> list[str]:
    r"""Split a text after each "\n"."""
    return _LINE.findall(text)


def _closes(line: str, opening: str) -> bool:
    fence = _FENCE.match(line)
    return fence is not None and not fence[2] and fence[1].startswith(opening)


def _has_paired_fences(lines: Sequence[str]) -> bool:
    """Return True if each code fence is closed; one with a language opens a block, also in another block."""
    openings = list[str]()
    for fence in filter(None, map(_FENCE.match, lines)):
        if openings and not fence[2] and fence[1].startswith(openings[-1]):
            openings.pop()
        else:
            openings.append(fence[1])
    return not openings


def merge_lines(original: str, new: str) -> tuple[list[str], int]:
    """Return the lines of a new file with the line ends of the original, and the number of changed lines.

    The new file has a line end after its last line unless the original has none there.
    """
    old_lines, new_lines = split_lines(original), [line.rstrip("\r\n") for line in split_lines(new)]
    end = "\r\n" if 2 * original.count("\r\n") > original.count("\n") else "\n"
    lines, n_changed = list[str](), 0
    matcher = SequenceMatcher(None, [line.rstrip("\r\n") for line in old_lines], new_lines)
    for kind, old_start, old_end, start, stop in matcher.get_opcodes():
        if kind == "equal":
            lines += [line if line.endswith("\n") else line + end for line in old_lines[old_start:old_end]]
        else:
            lines += [line + end for line in new_lines[start:stop]]
            n_changed += max(old_end - old_start, stop - start)
    if lines and original and not original.endswith("\n"):
        lines[-1] = lines[-1].rstrip("\r\n")
    return lines, n_changed


def format_diff(name: str, original: str, lines: Sequence[str]) -> Iterator[str]:
    path = name.lstrip("/")
    for line in unified_diff(split_lines(original), lines, f"a/{path}", f"b/{path}"):
        yield line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n"


def replace_text(path: Path, text: str) -> None:
    """Replace the text of a file atomically; its mode and its byte order mark stay."""
    mark = BOM_UTF8 if path.read_bytes().startswith(BOM_UTF8) else b""
    with atomic_path(path) as temporary:
        temporary.write_bytes(mark + text.encode())
        shutil.copymode(path, temporary)
