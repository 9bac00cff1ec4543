"""Sentinel: sits beside a PyTorch run, says what is wrong, where and since when, and can undo it.

import sentinel
monitor = sentinel.attach(model, optimizer)
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from sentinel._version import __version__ as __version__

__all__ = ["Monitor", "Rollback", "attach", "resume"]

for _name in ("hooks", "rules"):  # folders of their own in the source tree
    if not os.path.isdir(os.path.join(os.path.dirname(__file__), _name)):
        raise ImportError(
            f"{os.path.dirname(__file__)}/{_name} is no folder: this copy of Sentinel's source has lost its symbolic "
            "links. Clone it with git (on Windows with core.symlinks=true), unpack its archive with a tool that keeps "
            "them, or run Python in another folder if Sentinel is installed."
        )

if TYPE_CHECKING:
    from sentinel.hooks import Monitor, Rollback, attach, resume


def __getattr__(name: str) -> Any:
    # Late, so that the daemon and the command line run without torch and `import sentinel` stays under 50 ms.
    if name in __all__:
        import sentinel.hooks

        return getattr(sentinel.hooks, name)
    raise AttributeError(f"module 'sentinel' has no attribute {name!r}")
