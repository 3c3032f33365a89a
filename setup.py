"""The compiled core: modules that are plain Python too, and run as such where no C compiler is at hand."""

import os

from Cython.Build import cythonize
from setuptools import Extension, setup

MODULES = (
    "ngramspec.cost.curve",
    "ngramspec.drafting.draft",
    "ngramspec.drafting.acceptance_estimator",
    "ngramspec.drafting.predictor",
    "ngramspec.drafting.token_index",
    "ngramspec.drafting.mixture.history",
    "ngramspec.drafting.mixture.chance_mixer",
    "ngramspec.drafting.mixture.context_counts",
    "ngramspec.drafting.mixture.answers",
    "ngramspec.drafting.mixture.pointers",
    "ngramspec.drafting.mixture.position_scorer",
    "ngramspec.drafting.mixture.guesser",
    "ngramspec.decoding.branches",
    "ngramspec.sampling.rows",
    "ngramspec.policies.draft_value",
    "ngramspec.policies.cost",
)

extensions = cythonize(
    [Extension(name, [name.replace(".", "/") + ".py"]) for name in MODULES], build_dir="build/cython"
)
for extension in extensions:
    # Only now: cythonize makes new extensions, which do not inherit it.
    extension.optional = True
    if os.name == "posix":
        # Debug information was a third of the wheel's size and of the build time; -O3 vectorizes loops.
        extension.extra_compile_args = ["-g0", "-O3"]

setup(ext_modules=extensions)
