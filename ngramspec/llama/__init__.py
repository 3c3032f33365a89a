"""All code that uses llama.cpp, and no other code."""

from contextlib import redirect_stdout

# JamePeng's fork prints while it is imported, but stdout must contain only the response.
with redirect_stdout(None):
    import llama_cpp as llama_cpp
