"""What the child process of `ngramspec.llama.amx` does: a few batches with the AMX kernels and with plain ones."""

from __future__ import annotations

import sys

import numpy as np

from ngramspec import child
from ngramspec.llama.amx import DIFFERS, TOLERANCE
from ngramspec.llama.target import Target
from ngramspec.models.find import demo_model


def compare() -> int:
    """What the child does: a few batches with the AMX kernels and with plain ones. Returns its exit code."""
    results, path = [], demo_model().path
    for extra, threads in ((False, 1), (True, 2)):
        with Target(path, n_ctx=64, n_gpu_layers=0, threads=threads, extra_buffers=extra, exact="off") as target:
            results.append(np.concatenate([target.evaluate(range(1, n + 1)).copy() for n in (2, 5, 16)]))
    plain, tried = results
    # False for a NaN too.
    return 0 if np.linalg.norm(tried - plain) <= TOLERANCE * np.linalg.norm(plain) else DIFFERS


if __name__ == "__main__":
    child.confine()
    sys.exit(compare())
