"""Conflicts of lexemes: which of them could be read so far that another reading of the text is missed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise

from ngramspec.grammars.gbnf import Chars, Choice, Node, Reference, Repetition, Sequence, Text
from ngramspec.grammars.rules import Alphabet

_MAX_POSITIONS = 20_000  # maximum number of characters of a lexeme; a larger one is split
# With more starts or pairs, all lexemes are split, down to single characters.
_MAX_STARTS = 2000  # maximum number of characters that lexemes begin with
_MAX_PAIRS = 300_000  # maximum number of pairs of characters that are compared
_COUNTED = 64  # maximum number of characters of a repetition that is compared exactly


@dataclass(slots=True, eq=False)
class Lexeme:
    """A part of the grammar that one regular expression matches, or the empty text if `nullable`."""

    node: Node
    nullable: bool
    follow: int = 0  # mask of the characters that may come after the lexeme


@dataclass(slots=True)
class _Positions:
    """The numbered characters of all lexemes, with the characters that may come after each in its lexeme."""

    masks: list[int] = field(default_factory=list)
    owners: list[Lexeme] = field(default_factory=list)
    after: list[set[int]] = field(default_factory=list)

    def add(self, mask: int, owner: Lexeme) -> int:
        self.masks.append(mask)
        self.owners.append(owner)
        self.after.append(set())
        return len(self.masks) - 1


class Conflicts:
    """Finds the conflicts of lexemes of a grammar with these rules and characters."""

    def __init__(self, rules: Mapping[str, Node], alphabet: Alphabet) -> None:
        self._rules, self._alphabet = rules, alphabet

    def find(self, lexemes: list[Lexeme]) -> list[Node]:
        """Return the nodes of the lexemes that could be read too far."""
        known = _Positions()
        ends = set[int]()
        starts = set[int]()
        too_large: list[Node] = []
        for lexeme in lexemes:
            try:
                _, first, last = self._place(lexeme.node, known, lexeme, len(known.masks))
            except OverflowError:
                too_large.append(lexeme.node)
                continue
            starts |= first
            ends |= last
        longer: list[Node] = [one.node for one in lexemes if not isinstance(one.node, Chars)]
        if too_large or len(starts) > _MAX_STARTS:
            return too_large or longer
        masks, owners, after = known.masks, known.owners, known.after
        found: dict[int, Node] = {}
        seen = set[tuple[int, int]]()
        waiting = [(p, q) for p in starts for q in starts if masks[p] & masks[q]]
        while waiting:
            pair = waiting.pop()
            if pair in seen:
                continue
            seen.add(pair)
            if len(seen) > _MAX_PAIRS:
                return longer
            p, q = pair
            if p in ends:
                follow = owners[p].follow
                if any(masks[after_q] & follow for after_q in after[q]):
                    found[id(owners[q].node)] = owners[q].node
            waiting += [(a, b) for a in after[p] for b in after[q] if masks[a] & masks[b]]
        return list(found.values())

    def _place(self, node: Node, known: _Positions, owner: Lexeme, start: int) -> _Placed:  # noqa: PLR0911, PLR0912
        """Number the characters of a node; return whether it may be empty, and its first and last characters.

        Raises:
            OverflowError: The lexeme has too many characters.
        """
        if len(known.masks) - start > _MAX_POSITIONS:
            raise OverflowError
        match node:
            case Chars(ranges):
                position = known.add(self._alphabet.mask(ranges), owner)
                return False, {position}, {position}
            case Text(text):
                numbers = [known.add(self._alphabet.letter(letter), owner) for letter in text]
                for before, after in pairwise(numbers):
                    known.after[before].add(after)
                return False, {numbers[0]}, {numbers[-1]}
            case Reference(name):
                return self._place(self._rules[name], known, owner, start)
            case Choice(options):
                each = [self._place(option, known, owner, start) for option in options]
                return (
                    any(empty for empty, _, _ in each),
                    set().union(*(first for _, first, _ in each)),
                    set().union(*(last for _, _, last in each)),
                )
            case Sequence(parts):
                empty, first, last = True, set[int](), set[int]()
                for part in parts:
                    here = self._place(part, known, owner, start)
                    empty, first, last = _joined(known, (empty, first, last), here)
                return empty, first, last
            case Repetition(part, least, most):
                if most == 0:
                    return True, set(), set()
                before = len(known.masks)
                once = self._place(part, known, owner, start)
                size = max(1, len(known.masks) - before)
                counted = most if most is not None else least
                if counted * size > _COUNTED:
                    # The repetition is compared as if it had no bounds. This finds all conflicts, and perhaps others.
                    _joined(known, once, once)
                    return least == 0 or once[0], once[1], once[2]
                whole = (least == 0 or once[0], once[1], once[2])
                for number in range(2, counted + 1):
                    again = self._place(part, known, owner, start)
                    whole = _joined(known, whole, (number > least or again[0], again[1], again[2]))
                    once = again
                if most is None:
                    _joined(known, once, once)
                return whole
        raise AssertionError(node)


_Placed = tuple[bool, set[int], set[int]]


def _joined(known: _Positions, left: _Placed, right: _Placed) -> _Placed:
    """Let one part follow another; whether both may be empty, and the first and last characters of both together."""
    for position in left[2]:
        known.after[position] |= right[1]
    return (
        left[0] and right[0],
        left[1] | right[1] if left[0] else left[1],
        left[2] | right[2] if right[0] else right[2],
    )
