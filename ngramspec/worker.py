"""Child process for untrusted input (grammars, chat templates), with limits on its time and memory (`Worker`).

Libraries that compile grammars or render templates can take minutes or gigabytes, or crash. In a child process they end
only the child, and the next call starts another one.
"""

from __future__ import annotations

import faulthandler
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import IO, Any, TypeVar, cast
from weakref import finalize

from ngramspec.data import ShutdownError

SECONDS = 2.0 if sys.platform != "win32" else 10.0  # maximum processor time of a call; on Windows, maximum time
PATIENCE = 10.0  # maximum time that a call waits for other calls

T = TypeVar("T")


class Worker:
    """A child process that runs functions, one at a time; the methods may be called from any thread.

    Its messages say that "the grammar" (`subject`) takes too much time to "prepare" (`action`). They are of the class
    `error`, or a ShutdownError for calls that `close` ends or prevents. `memory` limits the address space of the child,
    if the system can do that, and `cache` the arguments and results that are kept for repeated calls, both in bytes.
    """

    def __init__(
        self, subject: str, action: str, error: type[Exception], *, memory: int = 4 * 2**30, cache: int = 0
    ) -> None:
        self._subject, self._action, self._error = subject, action, error
        self._memory, self._cache = memory, cache
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0  # id of the process that started the child
        self._closed = False
        self._results: OrderedDict[bytes, bytes] = OrderedDict()

    def call(self, function: Callable[..., T], *arguments: Any, **keywords: Any) -> T:
        """Return the result of a function of a module, or raise its error or one of this worker's."""
        request = pickle.dumps((function, arguments, keywords), pickle.HIGHEST_PROTOCOL)
        if not self._lock.acquire(timeout=PATIENCE):
            raise self._error(f"{self._subject} waited {PATIENCE:g} s for those of other requests; try again")
        try:
            answer = self._results.get(request) or self._ask(request)
            if self._cache:
                self._results[request] = answer
                self._results.move_to_end(request)
                while sum(len(key) + len(value) for key, value in self._results.items()) > self._cache:
                    self._results.popitem(last=False)
        finally:
            self._lock.release()
        result, error = pickle.loads(answer)
        if error is None:
            return cast(T, result)
        if isinstance(error, MemoryError):
            raise self._error(f"{self._subject} takes too much memory to {self._action}")
        raise error

    def start(self) -> None:
        """Start the child, so that the first call need not wait for it."""
        with self._lock:
            self._ensure_running()

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
            _end(process)

    def _ensure_running(self) -> subprocess.Popen[bytes] | None:
        is_forked = self._owner != os.getpid()  # a copy of this process must not use its child
        if self._process is None or is_forked or self._process.poll() is not None:
            self._process, self._owner = _start(self._memory), os.getpid()
        return self._process

    def _check_open(self) -> None:
        if self._closed:
            raise ShutdownError("the server is shutting down")

    def _ask(self, request: bytes) -> bytes:
        self._check_open()
        process = self._ensure_running()
        if process is None:
            return _answer(request)
        if self._closed:
            # `close` may have killed the child since the first look, in which case this is a new one.
            _end(process)
            self._check_open()
        assert process.stdin is not None
        assert process.stdout is not None
        answer = None
        try:
            with suppress(OSError):
                _write(process.stdin, request)
                answer = _read(process.stdout)
        finally:
            if answer is None:  # the child ended, or an interrupt left it in the middle of an answer
                self._process = None
                _end(process)
        if answer is not None:
            return answer
        self._check_open()
        late = process.returncode == (1 if sys.platform == "win32" else -signal.SIGPROF)
        limit = f"more than {SECONDS:g} s" if late else "too much memory"
        raise self._error(f"{self._subject} takes {limit} to {self._action}")


# --------------------------------------------------------------------------- the child


def _start(memory: int) -> subprocess.Popen[bytes] | None:
    """Start the child; return `None` if it cannot be started."""
    # In a frozen application, the executable is not Python, and would start the application again.
    if not sys.executable or getattr(sys, "frozen", False):
        return None
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(entry or "." for entry in sys.path)}
    command = [sys.executable, "-P", "-m", __name__, str(SECONDS), str(memory)]
    try:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=env
        )
    except OSError:
        return None
    finalize(process, process.kill)
    return process


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()  # so that the next call does not take it for a running one


def _write(stream: IO[bytes], message: bytes) -> None:
    stream.write(len(message).to_bytes(8, "little") + message)
    stream.flush()


def _read(stream: IO[bytes]) -> bytes | None:
    """Read a message; return `None` at the end of the stream."""
    size = stream.read(8)
    message = stream.read(int.from_bytes(size, "little")) if len(size) == 8 else b""
    return message if size and len(message) == int.from_bytes(size, "little") else None


def _answer(request: bytes) -> bytes:
    """Return the pickled result and error of a call."""
    error: Exception
    try:
        function, arguments, named = pickle.loads(request)
        return pickle.dumps((function(*arguments, **named), None), pickle.HIGHEST_PROTOCOL)
    except MemoryError:
        error = MemoryError()
    except Exception as raised:
        error = raised
    try:
        answer = pickle.dumps((None, error))
        pickle.loads(answer)
    except Exception:  # not every exception can be pickled
        answer = pickle.dumps((None, RuntimeError(f"{type(error).__name__}: {error}")))
    return answer


def _stop_after(seconds: float) -> None:
    """End this process after this much processor time, even inside a C function; 0 means never."""
    if sys.platform != "win32":
        signal.setitimer(signal.ITIMER_PROF, seconds)
    elif seconds:
        faulthandler.dump_traceback_later(seconds, exit=True)
    else:
        faulthandler.cancel_dump_traceback_later()


def _serve(seconds: float, memory: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the parent, which ends this process
    with suppress(ImportError, OSError, ValueError):
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    while (request := _read(sys.stdin.buffer)) is not None:
        _stop_after(seconds)
        answer = _answer(request)
        _stop_after(0)
        _write(sys.stdout.buffer, answer)


if __name__ == "__main__":
    _serve(float(sys.argv[1]), int(sys.argv[2]))
