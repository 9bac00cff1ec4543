"""What `sentinel --version` prints: all that a report of a fault should name. Imports no torch, which takes seconds."""

from __future__ import annotations

import platform
from importlib import metadata
from importlib.machinery import PathFinder
from pathlib import Path

from sentinel._version import __version__

KERNEL = Path(__file__).parents[1] / "hooks" / "measure"
"""Where the build puts the compiled kernel for statistics of gradients."""


def describe_versions() -> str:
    """Versions of Sentinel, torch, Python and the platform, and whether the compiled kernel is there."""
    try:
        torch = metadata.version("torch")
    except metadata.PackageNotFoundError:
        torch = "not installed"
    kernel = "built" if PathFinder.find_spec("_onepass", [str(KERNEL)]) is not None else "not built: torch is used"
    return (
        f"sentinel, version {__version__}\n"
        f"torch {torch}, Python {platform.python_version()}, {platform.platform()}, gradient kernel {kernel}"
    )
