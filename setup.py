"""The build, beside pyproject.toml: what it needs of the tree, and the mark of the kernel's sources in the kernel."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build import build
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
LINKED = ("hooks/__init__.py", "rules/__init__.py", "rules/runbook.md", "examples/__init__.py")
SOURCES = ("_onepass.c", "_dlpack.h")

for name in LINKED:
    if not ROOT.joinpath("sentinel", name).is_file():
        raise SystemExit(
            f"sentinel/{name} is not there: this copy of the source has lost its symbolic links. Clone it with git (on "
            "Windows with core.symlinks=true), unpack its archive with a tool that keeps them, or install from PyPI."
        )


class Build(build):
    """Nothing from the build before: what is no longer in the tree would be in the wheel."""

    def run(self) -> None:
        shutil.rmtree(self.build_lib, ignore_errors=True)
        super().run()


class BuildKernel(build_ext):
    """Whatever the files' times say: an archive that is unpacked over a tree may hold older files than the kernel."""

    def run(self) -> None:
        self.force = True
        super().run()

    def build_extension(self, ext: Extension) -> None:
        content = b"".join(ROOT.joinpath("sentinel", "hooks", "measure", file).read_bytes() for file in SOURCES)
        ext.define_macros = [("SOURCE", f'"{hashlib.sha256(content).hexdigest()}"')]
        super().build_extension(ext)


setup(cmdclass={"build": Build, "build_ext": BuildKernel})
