"""However Sentinel is installed, it works in the root of a clone too, with its kernel; a broken copy says so.

Builds copies of the source in environments of their own, without a network: the packages that Sentinel needs are those
of the present environment.
"""

from __future__ import annotations

import os
import shutil
import site
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from sentinel.web import fetch_charts
from tests.source import SOURCE

pytestmark = [pytest.mark.slow, pytest.mark.processes, pytest.mark.timeout(600)]

BUILT = shutil.ignore_patterns(
    ".git", ".venv", "build", "dist", "*.egg-info", "*.so", "__pycache__", ".*_cache", ".hypothesis", "demo-output"
)
LIBRARY = SOURCE / "sentinel" / "web" / fetch_charts.FOLDER.name
OURS = ("sentinel", "training_sentinel", "__editable__")
SCRIPT = """
import torch
import sentinel
from sentinel.hooks.measure import kernels
from sentinel.web import charts

model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
with sentinel.attach(model, optimizer):
    for _ in range(20):
        optimizer.zero_grad()
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
print("package", sentinel.__file__)
print("kernel", repr(kernels.kernel_missing))
print("charts", charts.is_present())
"""
TEST = """
from sentinel.hooks.measure import kernels

def test_the_kernel_is_there():
    assert kernels.kernel_missing == ""
"""


def run(folder: Path, *command: str | Path, fails: bool = False) -> str:
    """Return what a command prints in a folder, after checking that it fails just if `fails`."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    environment["npm_config_registry"] = "http://127.0.0.1:9"  # nothing listens there
    done = subprocess.run(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300
    )
    assert (done.returncode != 0) is fails, done.stdout
    return done.stdout


def clone(target: Path) -> Path:
    """Copy the source as a fresh clone has it, with nothing built, and add two scripts to it."""
    shutil.copytree(SOURCE, target, symlinks=True, ignore=BUILT)
    (target / "train.py").write_text(SCRIPT)
    (target / "test_kernel.py").write_text(TEST)
    return target


class Environment:
    """A virtual environment with all packages of the present one except Sentinel."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.python = folder, folder / "bin" / "python"
        run(folder.parent, sys.executable, "-m", "venv", "--without-pip", folder)
        others = folder / "others"
        others.mkdir()
        for place in (Path(entry) for entry in (*site.getsitepackages(), *sys.path) if entry.endswith("-packages")):
            for path in place.iterdir() if place.is_dir() else ():
                if not path.name.startswith(OURS) and path.suffix != ".pth" and not (others / path.name).exists():
                    (others / path.name).symlink_to(path)
        [packages] = folder.glob("lib/python*/site-packages")
        (packages / "others.pth").write_text(f"{others}\n")

    def install(self, folder: Path, *what: str | Path, fails: bool = False) -> str:
        """Install with pip, in a folder."""
        options = ("--disable-pip-version-check", "--no-deps", "--no-build-isolation", "--no-index")
        return run(folder, self.python, "-m", "pip", "install", *options, *what, fails=fails)

    def build(self, folder: Path, kind: str) -> Path:
        """Build a wheel or an sdist of the source in a folder, and return its path."""
        run(folder, self.python, "-m", "build", "--no-isolation", f"--{kind}", "--outdir", self.folder / "dist", ".")
        [made] = (self.folder / "dist").glob("*.whl" if kind == "wheel" else "*.tar.gz")
        return made


@pytest.fixture
def environment(tmp_path: Path) -> Environment:
    return Environment(tmp_path / "environment")


def install_from_source(environment: Environment, root: Path) -> None:
    environment.install(root, ".")


def install_editable(environment: Environment, root: Path) -> None:
    environment.install(root, "-e", ".")


def install_sdist(environment: Environment, root: Path) -> None:
    environment.install(root.parent, environment.build(clone(root.parent / "release"), "sdist"))


def install_wheel(environment: Environment, root: Path) -> None:
    environment.install(root.parent, environment.build(clone(root.parent / "release"), "wheel"))


WAYS = [install_from_source, install_editable, install_sdist, install_wheel]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("install", WAYS)
def test_it_works_in_the_root_of_a_clone_and_elsewhere(
    install: Callable[[Environment, Path], None], environment: Environment, tmp_path: Path
) -> None:
    root = clone(tmp_path / "clone")
    install(environment, root)
    python, command = environment.python, environment.folder / "bin" / "sentinel"
    run(root, python, "-c", "import sentinel.hooks")
    for version in ((command, "--version"), (python, "-m", "sentinel", "--version")):
        assert "gradient kernel built" in run(root, *version)
    said = run(root, python, "train.py")
    assert f"package {root}" in said
    assert "kernel ''" in said
    (tmp_path / "elsewhere.py").write_text(SCRIPT)
    said = run(tmp_path, python, "elsewhere.py")
    assert "kernel ''" in said
    assert f"charts {LIBRARY.exists()}" in said, "what is in the source is in the package"
    run(root, python, "-m", "pytest", "-q", "test_kernel.py", "tests/test_places.py")
    said = run(root, command, "doctor", "--", python, "train.py")
    assert "Traceback" not in said
    assert "No module" not in said


def test_a_build_without_a_network_has_still_charts_and_says_so(environment: Environment, tmp_path: Path) -> None:
    root = clone(tmp_path / "clone")
    shutil.rmtree(root / LIBRARY.relative_to(SOURCE), ignore_errors=True)
    assert "warning: page and report will have still charts only" in environment.install(root, "-v", ".")
    (tmp_path / "elsewhere.py").write_text(SCRIPT)
    assert "charts False" in run(tmp_path, environment.python, "elsewhere.py")


def test_a_kernel_of_other_sources_is_not_loaded(environment: Environment, tmp_path: Path) -> None:
    root = clone(tmp_path / "clone")
    environment.install(root, "-e", ".")
    with (root / "hooks" / "measure" / "_onepass.c").open("a") as file:
        file.write("/* another version */\n")
    for command in (("train.py",), ("-m", "sentinel", "--version")):
        said = run(root, environment.python, *command)
        assert f"was built from other sources than {root}/sentinel/hooks/measure has" in said
    environment.install(root, ".")
    assert "kernel ''" in run(root, environment.python, "train.py"), "that of the installed package, as it fits"


def test_the_files_in_sdist_and_wheel(environment: Environment, tmp_path: Path) -> None:
    root = clone(tmp_path / "clone")
    stale = root / "build" / f"lib.{sysconfig.get_platform()}-{sys.implementation.cache_tag}" / "sentinel" / "gone.py"
    stale.parent.mkdir(parents=True)
    stale.touch()  # of an earlier build
    package = root / "sentinel"
    with tarfile.open(environment.build(root, "sdist")) as archive:
        packed = {member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()}
    kernel = {"sentinel/hooks/measure/_onepass.c", "sentinel/hooks/measure/_dlpack.h"}
    modules = {str(path.relative_to(root)) for path in files_of(package) if path.suffix == ".py"}
    data = {str(path.relative_to(root)) for path in files_of(package) if path.suffix not in (".py", ".c", ".h")}
    of_setuptools = {name for name in packed if ".egg-info/" in name} | {"PKG-INFO", "setup.cfg"}
    beside = {"LICENSE", "MANIFEST.in", "README.md", "pyproject.toml", "setup.py"}
    assert packed - of_setuptools == modules | data | kernel | beside

    with zipfile.ZipFile(environment.build(root, "wheel")) as wheel:
        names = wheel.namelist()
    assert len(names) == len(set(names))
    [built] = [name for name in names if name.endswith(".so")]
    assert built.startswith("sentinel/hooks/measure/_onepass.")
    assert {name for name in names if ".dist-info/" not in name} == modules | data | {built}


def files_of(folder: Path) -> list[Path]:
    """Return all files below a folder, through its links, without what is compiled."""
    below = [Path(place, name) for place, _, names in os.walk(folder, followlinks=True) for name in names]
    return [path for path in below if "__pycache__" not in path.parts and path.suffix != ".so"]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("lost", ["text", "absent"])
def test_a_copy_that_lost_its_links_says_so(lost: str, environment: Environment, tmp_path: Path) -> None:
    root = clone(tmp_path / "clone")
    for name in ("hooks", "rules", "examples"):
        link = root / "sentinel" / name
        content = os.readlink(link)
        link.unlink()
        if lost == "text":  # as git writes them with core.symlinks=false
            link.write_text(content)
    said = environment.install(root, ".", fails=True)
    assert "sentinel/hooks/__init__.py is not there: this copy of the source has lost its symbolic links" in said
    assert "Traceback" not in said
    said = run(root, environment.python, "-c", "import sentinel", fails=True)
    assert f"ImportError: {root}/sentinel/hooks is no folder: this copy of Sentinel's source has lost its" in said
