"""Sentinel: sits beside a PyTorch run, says what is wrong, where and since when, and can undo it.

import sentinel
monitor = sentinel.attach(model, optimizer)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["Monitor", "Rollback", "attach", "resume"]

if TYPE_CHECKING:
    from sentinel.hooks import Monitor, Rollback, attach, resume


def __getattr__(name: str) -> Any:
    # Late, so that the daemon and the command line run without torch and `import sentinel` stays under 50 ms.
    if name in __all__:
        import sentinel.hooks

        return getattr(sentinel.hooks, name)
    raise AttributeError(f"module 'sentinel' has no attribute {name!r}")
