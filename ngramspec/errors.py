"""The errors a user can cause and fix. A message is one line: what was wrong, and what to do.

A defect of ngramspec itself is never one of these; it stays an ordinary Python exception with its
traceback.
"""

from __future__ import annotations


class NGramSpecError(Exception):
    """Base of every error meant to be shown to the user as it stands, without a traceback."""


class ModelError(NGramSpecError):
    """The model that was asked for cannot be used."""


class TargetError(NGramSpecError):
    """llama.cpp failed in the middle of its work."""


class PromptError(NGramSpecError):
    """The prompt cannot be continued: it is empty, or does not fit in the context."""


class ShutdownError(NGramSpecError):
    """The server is shutting down."""


class GrammarError(NGramSpecError):
    """A grammar or JSON schema is not one, or leaves no token to choose."""
