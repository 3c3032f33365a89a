"""The compiled core: modules that are plain Python too, and run as such where no C compiler is at hand."""

import os
import re
from pathlib import Path
from tempfile import TemporaryDirectory

from Cython.Build import cythonize
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.modified import newer_group

MODULES = (
    "ngramspec.cost.times",
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
    "ngramspec.policies.budget",
    "ngramspec.policies.cost",
)


class BuildCore(build_ext):
    """Build command that, in the source tree, compiles only the modules that changed."""

    def run(self) -> None:
        self.in_tree = self.inplace  # setuptools resets `inplace` during the build
        super().run()

    def build_extension(self, ext: Extension) -> None:
        sources = [*ext.sources, *ext.depends]
        if self.force or not self.in_tree or newer_group(sources, self.get_ext_filename(ext.name)):
            ext.sources = cythonize([Extension(ext.name, ext.sources)], build_dir=self.build_temp)[0].sources
            super().build_extension(ext)


def find_declarations(name: str) -> set[Path]:
    """Return the .pxd files that a module is compiled with: only they and its source make it out of date."""
    files = [Path(name.replace(".", "/") + suffix) for suffix in (".py", ".pxd")]
    text = "".join(file.read_text() for file in files if file.exists())
    included = re.findall(r"from (?:cython\.cimports\.(ngramspec\S+)|(ngramspec\S+) cimport)", text)
    return {file for file in files[1:] if file.exists()}.union(*(find_declarations(a or b) for a, b in included))


extensions = [
    Extension(
        name,
        [name.replace(".", "/") + ".py"],
        depends=sorted(map(str, find_declarations(name))),
        optional=True,
        # Debug information was a third of the wheel's size and of the build time; -O3 vectorizes loops.
        extra_compile_args=["-g0", "-O3"] if os.name == "posix" else [],
    )
    for name in MODULES
]

# C code and objects, more than 40 MB, must not stay in the user's folder.
with TemporaryDirectory() as folder:
    setup(cmdclass={"build_ext": BuildCore}, ext_modules=extensions, options={"build": {"build_base": folder}})
