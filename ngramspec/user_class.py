"""The user's own drafters and policies: `--drafter FILE.py:Class` and `--policy FILE.py:Class`.

Loading a class runs its file. `UserDrafter` and `UserPolicy` call it, check what it returns, and never let it change
the text. All errors of the file are reported in one line that names the file and the line.
"""

from __future__ import annotations

import inspect
import math
import operator
import os
import sys
from abc import ABCMeta
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from traceback import walk_tb
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar, cast

from ngramspec.cost.times import PassTimes, RestoreCost
from ngramspec.data import CLASS_FORM, UserCodeError
from ngramspec.drafting.draft import Ask, Draft, Drafter, MarginalCost
from ngramspec.policies.policy import Policy, smallest
from ngramspec.sampling.settings import Sampling
from ngramspec.steps import Step
from ngramspec.storage import UTF16, is_utf16
from ngramspec.tokens import Tokenizer, common_prefix

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Base = TypeVar("Base")

_modules: dict[Path, tuple[int, ModuleType]] = {}  # time of modification and module of each file


def load_class(name: str, base: Callable[..., Base]) -> type[Base]:
    """Load a class from FILE.py:Class; raise a UserCodeError if it has no such complete subclass of `base`."""
    kind = cast(type[Base], base)  # as a callable, because the type checker rejects an abstract class as a type
    file, _, class_name = name.rpartition(":")
    if not file.endswith(".py") or not class_name.isidentifier():
        raise UserCodeError(f"{name!r} does not name a class; use {CLASS_FORM}")
    path = Path(file).expanduser()
    module = _load_module(path)
    value = getattr(module, class_name, None)
    if not isinstance(value, type):
        classes = [item for item in vars(module).values() if isinstance(item, type) and issubclass(item, kind)]
        own = [item.__name__ for item in classes if item.__module__ == module.__name__]
        raise UserCodeError(f"{path} has no class {class_name!r}; its classes for this option: {', '.join(own) or '-'}")
    if not issubclass(value, kind):
        raise UserCodeError(f"{name} must be derived from ngramspec.{kind.__name__}")
    if isinstance(value, ABCMeta) and (missing := value.__abstractmethods__):
        raise UserCodeError(f"{name} lacks the methods: {', '.join(sorted(missing))}")
    return value


def construct(name: str, kind: type[Base], arguments: Mapping[str, Any]) -> Base:
    """Construct a user's class; raise a UserCodeError if it does not accept these arguments or raises an error."""
    try:
        inspect.signature(kind).bind(**arguments)
    except TypeError as error:
        words = f"the arguments {', '.join(arguments)}" if arguments else "no arguments"
        raise UserCodeError(f"the constructor of {name} must accept {words}: {error}") from error
    with user_code(name):
        return kind(**arguments)


@contextmanager
def user_code(name: str) -> Iterator[None]:
    """Report every error that a user's class raises as a UserCodeError with its file and line."""
    try:
        yield
    except UserCodeError:
        raise
    except Exception as error:
        raise UserCodeError(_describe(name, name.rpartition(":")[0], error)) from error


def _load_module(path: Path) -> ModuleType:
    try:
        modified_at, source = path.stat().st_mtime_ns, path.read_bytes()
    except OSError as error:
        raise UserCodeError(f"cannot read {path}: {error.strerror}") from error
    if is_utf16(source):
        raise UserCodeError(f"{path} is {UTF16}")
    path = path.resolve()
    if path in _modules and _modules[path][0] == modified_at:
        return _modules[path][1]
    # Unique, so that a file called `json.py` does not replace the module of that name.
    name = f"ngramspec_user_{len(_modules)}_{path.stem}"
    module = ModuleType(name)
    module.__file__ = str(path)
    sys.modules[name] = module  # dataclasses look their module up
    try:
        # Not an import, which would write a folder `__pycache__` next to the user's file.
        exec(compile(source, str(path), "exec"), vars(module))
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise UserCodeError(_describe(str(path), str(path), error)) from error
    _modules[path] = modified_at, module
    return module


def _describe(name: str, file: str, error: BaseException) -> str:
    """Return the message of an error, with the innermost line of the user's file."""
    path = os.path.realpath(os.path.expanduser(file))
    lines = [number for frame, number in walk_tb(error.__traceback__) if frame.f_code.co_filename == path]
    words = str(error)
    if isinstance(error, SyntaxError):
        lines, words, file = [error.lineno or 1], error.msg, error.filename or file
    place = f" ({file}, line {lines[-1]})" if lines else ""
    message = " ".join(words.split())
    return f"{name} failed: {type(error).__name__}{': ' if message else ''}{message}{place}"


class UserDrafter(Drafter):
    """Calls a user's drafter, removes token ids that a verifier cannot process, and records q of the drawn tokens.

    Only `propose` raises the errors of the user's code: when it is called, no emitted token can be lost.
    """

    def __init__(self, name: str, vocabulary: Tokenizer | None = None) -> None:
        self.name, self.vocabulary = name, vocabulary
        self._n_vocab = None if vocabulary is None else vocabulary.n_vocab
        self._user = construct(name, load_class(name, Drafter), {})
        self._user.vocabulary = vocabulary
        self._tokens: tuple[int, ...] = ()  # tokens of the last proposal
        self._error: UserCodeError | None = None

    @property
    def wants_logits(self) -> bool:  # type: ignore[override]
        """True if the user's drafter reads logits."""
        return self._user.wants_logits

    @property
    def prediction(self) -> Sequence[int] | None:
        """Text that the next answer is likely to copy; `None` if the user's drafter does not support one."""
        return self._user.prediction

    @prediction.setter
    def prediction(self, tokens: Sequence[int] | None) -> None:
        if self._user.prediction is not None:
            self._user.prediction = tokens

    def clone_for_sequence(self) -> UserDrafter:
        return UserDrafter(self.name, self.vocabulary)

    def begin(self, prompt: Sequence[int]) -> None:
        self._tokens, self._error = (), None
        self._call(self._user.begin, list(prompt))

    def propose(self, ask: Ask) -> Draft:
        self._tokens, limit, choose = (), ask.limit, ask.choose
        if self._error is not None:
            raise self._error
        picks: list[int] = []
        q: list[Mapping[int, float]] = []

        def pick(_: int, weights: Mapping[int, float]) -> int:
            assert choose is not None
            shares = self._shares(weights)
            q.append(shares)
            picks.append(choose(len(picks), shares))
            return picks[-1]

        with user_code(self.name):
            draft = self._user.propose(
                Ask(limit, None if choose is None else pick, fixed_length=ask.fixed_length, price=ask.price)
            )
            if not isinstance(draft, Draft):
                raise UserCodeError(f"{self.name}: propose must return a Draft, not {type(draft).__name__}")
            # A drawn token stays in the draft: if it could be removed, q would not be its distribution.
            tokens = tuple(picks[:limit]) or self._usable(draft.tokens, limit)
        if choose is not None and not picks:
            # A token that was not drawn has probability 1, because it does not depend on random numbers.
            q = [{token: 1.0} for token in tokens]
        self._tokens = tokens

        def per_token(numbers: Sequence[Any]) -> tuple[Any, ...]:
            return tuple(numbers[: len(tokens)]) if len(numbers) >= len(tokens) else ()

        # With a fixed length, the caller estimates from earlier outcomes, without using the drawn tokens.
        chances = () if ask.fixed_length else per_token(draft.acceptance_probs)
        lengths, counts = per_token(draft.match_lengths), per_token(draft.context_counts)
        return Draft(tokens, tuple(q[:limit]), lengths, counts, chances, str(draft.source or self.name))

    def accept(self, tokens: Sequence[int]) -> int:
        guesses, self._tokens = self._tokens, ()
        self._call(self._user.accept, tuple(tokens))
        return common_prefix(guesses, tokens)

    def observe_logits(self, tokens: Sequence[int], rows: NDArray[np.float32], n_accepted: int = 0) -> None:
        rows = rows.view()
        rows.flags.writeable = False
        self._call(self._user.observe_logits, tuple(tokens), rows, n_accepted)

    def set_sampling(self, sampling: Sampling) -> None:
        self._call(self._user.set_sampling, sampling)

    def _call(self, call: Callable[..., object], *arguments: Any) -> None:
        """Call a method of the user's drafter; `propose` later raises its error."""
        if self._error is None:
            try:
                with user_code(self.name):
                    call(*arguments)
            except UserCodeError as error:
                self._error = error

    def _usable(self, tokens: Iterable[int], limit: int) -> tuple[int, ...]:
        """Return the tokens before the first one outside the vocabulary, at most `limit`."""
        try:
            ids = [operator.index(token) for token in tokens]
        except TypeError as error:
            raise UserCodeError(f"{self.name}: propose must return a Draft of token ids: {error}") from error
        return tuple(takewhile(self._is_known, ids[:limit]))

    def _shares(self, weights: Mapping[int, float]) -> dict[int, float]:
        """Return positive weights as probabilities."""
        valid = {token: weight for token, weight in weights.items() if weight > 0 and self._is_known(token)}
        total = sum(valid.values())
        if not 0 < total < math.inf:
            raise ValueError("choose requires positive weights of tokens in the vocabulary")
        return {token: weight / total for token, weight in valid.items()}

    def _is_known(self, token: int) -> bool:
        return token >= 0 and (self._n_vocab is None or token < self._n_vocab)


class UserPolicy(Policy):
    """A policy from a user's file (`--policy FILE.py:Class`), whose plans are limited to possible ones.

    Any failure of its code is a UserCodeError.
    """

    def __init__(self, name: str, draft_max: int | None = None) -> None:
        self.name = name
        arguments = {} if draft_max is None else {"draft_max": draft_max}
        self._user = construct(name, load_class(name, Policy), arguments)
        self.wants_logits = bool(self._user.wants_logits)

    def begin(self) -> None:
        with user_code(self.name):
            self._user.begin()

    def limit(self) -> int:
        with user_code(self.name):
            limit = self._user.limit()
            return max(0, self._to_int(limit, f"limit must return an integer, not {limit!r}"))

    def price(self, times: PassTimes | None, sizes: Sequence[int]) -> MarginalCost | None:
        with user_code(self.name):
            price = self._user.price(times, sizes)
        if price is not None and not (isinstance(price, MarginalCost) and len(price.slopes) > 1):
            raise UserCodeError(f"{self.name}: price must return None or a MarginalCost with at least two slopes")
        return price

    def plan(
        self, draft: Draft, times: PassTimes | None, sizes: Sequence[int], restore: RestoreCost | None = None
    ) -> tuple[int, int]:
        wrong = "plan must return two integers (draft tokens, batch size), not "
        with user_code(self.name):
            plan = self._user.plan(draft, times, sizes, restore)
            if not isinstance(plan, tuple) or len(plan) != 2:
                raise UserCodeError(f"{self.name}: {wrong}{plan!r}")
            length, size = (self._to_int(number, f"{wrong}{plan!r}") for number in plan)
        length = max(0, min(length, len(draft), sizes[-1] - 1))
        return length, smallest(min(max(1 + length, size), sizes[-1]), sizes)

    def record(self, done: Step) -> None:
        with user_code(self.name):
            copy = replace(done)  # the copy prevents user code from changing the record
            self._user.record(copy)
            done.policy_details = {str(name): float(number) for name, number in copy.policy_details.items()}

    def observe_logits(self, row: NDArray[np.float32]) -> None:
        row = row.view()
        row.flags.writeable = False
        with user_code(self.name):
            self._user.observe_logits(row)

    def _to_int(self, number: object, wrong: str) -> int:
        try:
            return operator.index(number)  # type: ignore[arg-type]
        except TypeError:
            raise UserCodeError(f"{self.name}: {wrong}") from None
