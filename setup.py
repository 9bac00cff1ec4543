"""Extends the build of pyproject.toml: checks the tree, fetches the charts' library, and marks the kernel.

The kernel gets a digest of its sources, by which it is known which sources it was compiled from.
"""

from __future__ import annotations

import hashlib
import runpy
import shutil
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build import build
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

ROOT = Path(__file__).resolve().parent
LINKED = ("hooks/__init__.py", "rules/__init__.py", "rules/runbook.md", "examples/__init__.py")
SOURCES = ("_onepass.c", "_dlpack.h")

for name in LINKED:
    if not ROOT.joinpath("sentinel", name).is_file():
        raise SystemExit(
            f"sentinel/{name} is not there: this copy of the source has lost its symbolic links. Clone it with git (on "
            "Windows with core.symlinks=true), unpack its archive with a tool that keeps them, or install from PyPI."
        )


def fetch_charts() -> None:
    """Fetch the library into the tree, so that runs from a clone have it too. Without a network the build goes on."""
    module = runpy.run_path(str(ROOT / "sentinel" / "web" / "fetch_charts.py"))
    try:
        module["fetch_library"]()
    except OSError as error:
        print(f"warning: page and report will have still charts only, as uPlot was not had: {error}", file=sys.stderr)


class Build(build):
    """Removes the previous build first: files no longer in the tree would otherwise get into the wheel."""

    def run(self) -> None:
        shutil.rmtree(self.build_lib, ignore_errors=True)
        super().run()


class BuildPackages(build_py):
    def run(self) -> None:
        fetch_charts()
        super().run()


class BuildSource(sdist):
    def run(self) -> None:
        fetch_charts()
        super().run()


class BuildKernel(build_ext):
    """Compiles whatever the files' times are: an archive unpacked over a tree may hold files older than the kernel."""

    def run(self) -> None:
        self.force = True
        super().run()

    def build_extension(self, ext: Extension) -> None:
        content = b"".join(ROOT.joinpath("sentinel", "hooks", "measure", file).read_bytes() for file in SOURCES)
        ext.define_macros = [("SOURCE", f'"{hashlib.sha256(content).hexdigest()}"')]
        super().build_extension(ext)


setup(cmdclass={"build": Build, "build_ext": BuildKernel, "build_py": BuildPackages, "sdist": BuildSource})
