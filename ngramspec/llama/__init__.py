"""All of llama.cpp, and nothing else."""

from contextlib import redirect_stdout

# JamePeng's fork prints while it is imported, and stdout is for the answer.
with redirect_stdout(None):
    import llama_cpp as llama_cpp
