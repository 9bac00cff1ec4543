"""Find the compiled kernel for gradient statistics, for the hooks, which call it, and for `sentinel --version`."""

from __future__ import annotations

import hashlib
import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from pathlib import Path
from typing import Any

_PLACE = ("hooks", "measure")
_HERE = Path(__file__).parents[1].joinpath(*_PLACE)
_SOURCES = ("_onepass.c", "_dlpack.h")
"""Sources of the kernel: in a source tree they are beside it, in an installed package they are not."""


def load_kernel() -> tuple[Any, str]:
    """Return the compiled kernel, or None and why there is none. Imports no torch.

    In the root of a clone Python imports the clone's own `sentinel`, however it was installed. Then the kernel of the
    installed package is used, if it was built from the clone's sources.
    """
    sources = [path for file in _SOURCES if (path := _HERE / file).exists()]
    wanted = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest() if sources else ""
    why = "not built: no C compiler when Sentinel was installed"
    for folder in dict.fromkeys([_HERE, *(Path(entry, "sentinel", *_PLACE) for entry in sys.path)]):
        spec = PathFinder.find_spec("sentinel.hooks.measure._onepass", [str(folder)])
        if spec is None or spec.loader is None:
            continue
        try:
            module = module_from_spec(spec)
            spec.loader.exec_module(module)
        except ImportError as error:
            why = str(error)
            continue
        if not wanted or getattr(module, "SOURCE", "") == wanted:
            return module, ""
        why = f"{spec.origin} was built from other sources than {_HERE} has: install Sentinel from there again"
    return None, why
