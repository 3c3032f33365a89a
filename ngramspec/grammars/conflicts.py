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
_MAX_COPIES = 64  # maximum number of characters of a repetition that is compared exactly


@dataclass(slots=True, eq=False)
class Lexeme:
    """A part of the grammar that one regular expression matches."""

    node: Node
    is_nullable: bool = False  # whether the lexeme may be the empty text
    first: int = 0  # mask of the characters that the lexeme may begin with
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
        positions = _Positions()
        ends = set[int]()
        starts = set[int]()
        too_large: list[Node] = []
        for lexeme in lexemes:
            try:
                _, first, last = self._place(lexeme.node, positions, lexeme, len(positions.masks))
            except OverflowError:
                too_large.append(lexeme.node)
                continue
            starts |= first
            ends |= last
        longer: list[Node] = [lexeme.node for lexeme in lexemes if not isinstance(lexeme.node, Chars)]
        if too_large or len(starts) > _MAX_STARTS:
            return too_large or longer
        masks, owners, after = positions.masks, positions.owners, positions.after
        conflicts: dict[Node, None] = {}
        visited = set[tuple[int, int]]()
        waiting = [(p, q) for p in starts for q in starts if masks[p] & masks[q]]
        while waiting:
            pair = waiting.pop()
            if pair in visited:
                continue
            visited.add(pair)
            if len(visited) > _MAX_PAIRS:
                return longer
            p, q = pair
            if p in ends:
                follow = owners[p].follow
                if any(masks[after_q] & follow for after_q in after[q]):
                    conflicts[owners[q].node] = None
            waiting += [(a, b) for a in after[p] for b in after[q] if masks[a] & masks[b]]
        return list(conflicts)

    def _place(self, node: Node, positions: _Positions, owner: Lexeme, start: int) -> _Ends:  # noqa: PLR0911
        """Number the characters of a node; return whether it may be empty, and its first and last characters.

        It raises an OverflowError if the lexeme has too many characters.
        """
        if len(positions.masks) - start > _MAX_POSITIONS:
            raise OverflowError
        match node:
            case Chars(ranges):
                position = positions.add(self._alphabet.mask(ranges), owner)
                return False, {position}, {position}
            case Text(text):
                numbers = [positions.add(self._alphabet.letter(letter), owner) for letter in text]
                for before, after in pairwise(numbers):
                    positions.after[before].add(after)
                return False, {numbers[0]}, {numbers[-1]}
            case Reference(name):
                return self._place(self._rules[name], positions, owner, start)
            case Choice(options):
                option_ends = [self._place(option, positions, owner, start) for option in options]
                return (
                    any(empty for empty, _, _ in option_ends),
                    set().union(*(first for _, first, _ in option_ends)),
                    set().union(*(last for _, _, last in option_ends)),
                )
            case Sequence(parts):
                empty, first, last = True, set[int](), set[int]()
                for part in parts:
                    part_ends = self._place(part, positions, owner, start)
                    empty, first, last = _concatenate(positions, (empty, first, last), part_ends)
                return empty, first, last
            case Repetition(part, minimum, maximum):
                before = len(positions.masks)
                previous = self._place(part, positions, owner, start)
                size = max(1, len(positions.masks) - before)
                whole = (minimum == 0 or previous[0], previous[1], previous[2])
                n_copies = maximum if maximum is not None else minimum
                if n_copies * size > _MAX_COPIES:
                    # The repetition is compared as if it had no bounds. This finds all conflicts, and perhaps others.
                    _concatenate(positions, previous, previous)
                    return whole
                for number in range(2, n_copies + 1):
                    current = self._place(part, positions, owner, start)
                    whole = _concatenate(positions, whole, (number > minimum or current[0], current[1], current[2]))
                    previous = current
                if maximum is None:
                    _concatenate(positions, previous, previous)
                return whole
        raise AssertionError(node)


_Ends = tuple[bool, set[int], set[int]]


def _concatenate(positions: _Positions, first: _Ends, second: _Ends) -> _Ends:
    """Let one part follow another; whether both may be empty, and the first and last characters of both together."""
    for position in first[2]:
        positions.after[position] |= second[1]
    return (
        first[0] and second[0],
        first[1] | second[1] if first[0] else first[1],
        first[2] | second[2] if second[0] else second[2],
    )
