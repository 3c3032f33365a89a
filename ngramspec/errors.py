"""Errors that a user can cause and fix. The message is one line with the problem and the solution.

Defects of ngramspec itself raise ordinary Python exceptions, which are shown with a traceback.
"""

from __future__ import annotations


class NGramSpecError(Exception):
    """Base class of errors whose message is shown to the user without a traceback."""


def get_reason(error: Exception) -> str:
    """Return the message of an error, without the number and the file that the text of an OSError contains."""
    return error.strerror if isinstance(error, OSError) and error.strerror else str(error)


class ModelError(NGramSpecError):
    """The requested model cannot be used."""


class TargetError(NGramSpecError):
    """llama.cpp failed during an evaluation."""


class PromptError(NGramSpecError):
    """The prompt cannot be continued: it is empty, or does not fit in the context."""


class ShutdownError(NGramSpecError):
    """The server is shutting down."""


class GrammarError(NGramSpecError):
    """A grammar or JSON schema is invalid, or allows no token."""
