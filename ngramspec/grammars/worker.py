"""`Worker`: a child process that prepares the grammars of strangers, so that none can stop or end this process.

llguidance limits what it compiles, but some limits allow minutes, and some grammars end the process. This process can
repeat what the child finished in time.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import lru_cache
from typing import IO, Any, TypeVar, cast
from weakref import finalize

import psutil
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from ngramspec.errors import GrammarError
from ngramspec.grammars.deep_stack import on_deep_stack
from ngramspec.grammars.lark import LIMITS, Lark, reason
from ngramspec.grammars.lexemes import gbnf_to_lark

SECONDS = 2.0
"""Maximum processor time to prepare a grammar."""

PATIENCE = 10.0
"""Maximum time to prepare a grammar on a busy machine, and to wait for other grammars."""

_MEMORY = 4 * 2**30  # bytes of address space of the child
_KNOWN = 8 * 2**20  # bytes of the results that are kept

T = TypeVar("T")


class Worker:
    """Calls functions in a child process, one at a time; its methods may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._closed = False
        self._known: OrderedDict[bytes, bytes] = OrderedDict()

    def call(self, function: Callable[..., T], *arguments: Any, **named: Any) -> T:
        """Return what a function of a module returns.

        Raises:
            GrammarError: the function raised it, or did not end in time.
        """
        asked = pickle.dumps((function, arguments, named))
        if not self._lock.acquire(timeout=PATIENCE):
            raise GrammarError(f"other grammars keep the server busy; this one waited {PATIENCE:g} s")
        try:
            answer = self._known.get(asked) or self._ask(asked)
            self._keep(asked, answer)
        finally:
            self._lock.release()
        done, result = pickle.loads(answer)
        if done:
            return cast(T, result)
        raise result

    @contextmanager
    def session(self) -> Iterator[None]:
        """Allow calls again at the end of this context if `close` was called in it."""
        try:
            yield
        finally:
            self._closed = False

    def close(self) -> None:
        """End the child; later calls fail until the session ends."""
        self._closed = True
        if (process := self._process) is not None:
            process.kill()

    def _ask(self, asked: bytes) -> bytes:
        if self._closed:
            raise GrammarError("the server is shutting down")
        process = self._process
        if process is None or process.poll() is not None:
            self._process = process = _start()
        if process is None:
            return _answer(asked)
        assert process.stdin is not None
        assert process.stdout is not None
        late, done = threading.Event(), threading.Event()
        threading.Thread(target=_watch, args=(process, late, done), name="grammar watch", daemon=True).start()
        try:
            _write(process.stdin, asked)
            answer = _read(process.stdout)
        except OSError:
            answer = None
        finally:
            done.set()
        if answer is not None:
            return answer
        self._process = None
        process.kill()
        process.wait()
        if self._closed:
            raise GrammarError("the server is shutting down")
        why = f"takes more than {SECONDS:g} s to prepare" if late.is_set() else "takes too much memory to prepare"
        raise GrammarError(f"the grammar {why}")

    def _keep(self, asked: bytes, answer: bytes) -> None:
        self._known[asked] = answer
        self._known.move_to_end(asked)
        while sum(len(key) + len(value) for key, value in self._known.items()) > _KNOWN:
            self._known.popitem(last=False)


worker = Worker()
"""The worker of this process; its child starts with the first call."""


def compiled(text: str, names: Mapping[str, int], n_vocab: int) -> Lark:
    """Return a grammar, GBNF or `Lark`, as one that llguidance can compile for a vocabulary of this size.

    Args:
        text: Grammar.
        names: Tokens that GBNF may name.
        n_vocab: Number of tokens.

    Raises:
        GrammarError: it is not a grammar, or exceeds a limit.
    """
    grammar = text if isinstance(text, Lark) else gbnf_to_lark(text, names.get)
    tokenizer = _tokenizer(n_vocab)
    matcher = on_deep_stack(
        lambda: LLMatcher(tokenizer, LLMatcher.grammar_from_lark(grammar), log_level=0, limits=LIMITS)
    )
    if matcher.is_error():
        raise GrammarError(f"the grammar cannot be used: {reason(matcher.get_error())}")
    return grammar


@lru_cache(1)
def _tokenizer(n_vocab: int) -> LLTokenizer:
    """Return a vocabulary of the bytes and further tokens without a text, which takes the place of the real one."""

    class Bytes:
        bos_token_id, eos_token_id = None, 255

        def __init__(self) -> None:
            self.tokens = [bytes([i]) if i < 255 else b"\xff[%d]" % i for i in range(max(n_vocab, 256))]
            self.special_token_ids: list[int] = []

        def __call__(self, text: bytes) -> list[int]:
            return [*text]

    return LLTokenizer(TokenizerWrapper(Bytes()))


# --------------------------------------------------------------------------- the child


def _start() -> subprocess.Popen[bytes] | None:
    """Start the child; None if it cannot be started."""
    # The program of a frozen application is not Python: it would start the application again.
    if not sys.executable or getattr(sys, "frozen", False):
        return None
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(entry or "." for entry in sys.path)}
    command = [sys.executable, "-P", "-m", __name__]
    try:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=env
        )
    except OSError:
        return None
    finalize(process, process.kill)
    return process


def _watch(process: subprocess.Popen[bytes], late: threading.Event, done: threading.Event) -> None:
    """End the child if it takes too long for a call."""
    began = time.monotonic()
    with suppress(psutil.Error):
        child = psutil.Process(process.pid)
        before = sum(child.cpu_times()[:2])
        while not done.wait(0.05):
            if sum(child.cpu_times()[:2]) - before > SECONDS or time.monotonic() - began > PATIENCE:
                late.set()
                process.kill()
                return


def _write(stream: IO[bytes], message: bytes) -> None:
    stream.write(len(message).to_bytes(8, "little") + message)
    stream.flush()


def _read(stream: IO[bytes]) -> bytes | None:
    """Read a message; None at the end of the stream."""
    size = stream.read(8)
    message = stream.read(int.from_bytes(size, "little")) if len(size) == 8 else b""
    return message if size and len(message) == int.from_bytes(size, "little") else None


def _answer(asked: bytes) -> bytes:
    function, arguments, named = pickle.loads(asked)
    try:
        return pickle.dumps((True, function(*arguments, **named)))
    except (GrammarError, ValueError, RecursionError) as error:
        kept = error if isinstance(error, GrammarError) else type(error)(str(error))
        return pickle.dumps((False, kept))
    except MemoryError:
        return pickle.dumps((False, GrammarError("the grammar takes too much memory to prepare")))


def _serve() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the parent, and that ends this
    with suppress(ImportError, OSError, ValueError):
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    while (asked := _read(sys.stdin.buffer)) is not None:
        _write(sys.stdout.buffer, _answer(asked))


if __name__ == "__main__":
    _serve()
