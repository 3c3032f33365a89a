"""The compiled core: modules that are plain Python too, and run as such where no C compiler is at hand."""

from Cython.Build import cythonize
from setuptools import Extension, setup

MODULES = (
    "ngramspec.drafting.token_index",
    "ngramspec.drafting.history",
    "ngramspec.drafting.odds",
    "ngramspec.drafting.guesser",
    "ngramspec.drafting.suffix_automaton",
)

setup(
    ext_modules=cythonize(
        [Extension(name, [name.replace(".", "/") + ".py"], optional=True) for name in MODULES],
        build_dir="build/cython",
    )
)
