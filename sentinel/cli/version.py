"""What `sentinel --version` prints: all that a bug report should name. Does not import torch, which takes seconds."""

from __future__ import annotations

import platform
from importlib import metadata

from sentinel._version import __version__
from sentinel.node.compiled_kernel import load_kernel


def describe_versions() -> str:
    """Return the versions of Sentinel, torch, Python and the platform, and whether the compiled kernel is there."""
    try:
        torch = metadata.version("torch")
    except metadata.PackageNotFoundError:
        torch = "not installed"
    kernel, why = load_kernel()
    return (
        f"sentinel, version {__version__}\n"
        f"torch {torch}, Python {platform.python_version()}, {platform.platform()}, "
        f"gradient kernel {'built' if kernel is not None else f'{why}; torch is used'}"
    )
