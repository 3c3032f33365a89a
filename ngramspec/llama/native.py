"""`NativeObject`: an object that owns memory of llama.cpp, and frees it when it is closed or no longer used."""

from __future__ import annotations

from typing import NoReturn, Self


class NativeObject:
    """Base class with a context manager that closes the object, which cannot be copied."""

    def close(self) -> None:
        """Free llama.cpp's objects; this object and what it returned cannot be used afterwards."""
        raise NotImplementedError

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"a {type(self).__name__} cannot be copied or pickled: it owns memory of llama.cpp")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()
