"""Has the first backward pass, or the first step of an optimizer, attach Sentinel. `sentinel run` puts this directory
on PYTHONPATH.

Python imports `sitecustomize` when it starts; the user's own, further down the path, is run by this one. It must cost a
process that has nothing to do with torch next to nothing: only the standard library, and torch is waited for.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False  # importing it would cost more than all the rest
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

_OPTIMIZER = "torch.optim.optimizer"


class _Finder:
    """Stands in front of the others until somebody imports torch's optimizers."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != _OPTIMIZER:
            return None
        sys.meta_path.remove(self)
        found = (finder.find_spec(name, path, target) for finder in list(sys.meta_path))
        spec = next((spec for spec in found if spec is not None), None)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)  # type: ignore[assignment]
        return spec


class _Loader:
    """Loads as the real loader does, and leaves it as the module's own."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def create_module(self, spec: Any) -> Any:
        return self._loader.create_module(spec)

    def exec_module(self, module: Any) -> None:
        module.__loader__ = module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        try:
            _listen(module)
        except Exception as error:
            _say(f"{type(error).__name__}: {error}")


def _listen(module: Any) -> None:
    from torch._compile import _disable_dynamo  # else torch.compile would trace into the hook

    found: list[Any] = []

    def find_attach() -> Any:
        if not found:
            found.append(_import_attach())
        return found[0]

    def step(optimizer: Any, args: Any, kwargs: Any) -> None:
        if (attach := find_attach()) is not None:
            attach.attach_at_step(optimizer)

    module.register_optimizer_step_pre_hook(_disable_dynamo(step))
    _stand_before_the_first_backward_pass(_disable_dynamo, find_attach)


def _stand_before_the_first_backward_pass(hide: Callable[[Any], Any], find_attach: Callable[[], Any]) -> None:
    """Once: where nobody has put something around it meanwhile, it is gone before the pass begins."""
    from functools import wraps

    from torch import autograd

    original = autograd.backward
    waiting = [True]

    @wraps(original)
    def backward(*args: Any, **kwargs: Any) -> Any:
        if not waiting:
            return original(*args, **kwargs)
        waiting.clear()
        if alone := autograd.backward is first:
            autograd.backward = original
        if (attach := find_attach()) is not None:
            attach.attach_at_backward()
        return (autograd.backward if alone else original)(*args, **kwargs)

    first = autograd.backward = hide(backward)


def _import_attach() -> Any:
    try:
        from sentinel.hooks import auto_attach
    except Exception as error:  # another environment's interpreter, or a broken one
        _say(f"{sys.executable}: {type(error).__name__}: {error}")
        return None
    return auto_attach


def _say(why: str) -> None:
    if sys.stderr is not None:
        sys.stderr.write(f"sentinel: {why}; training goes on unmonitored\n")


def _run_the_users_own() -> None:
    """Imports what Python would have imported, were this directory not there: `site` deals with what that raises."""
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry) != here]
    del sys.modules[__name__]
    __import__(__name__)


if __name__ == "sitecustomize":
    if os.environ.get("SENTINEL_DISABLED", "0") in ("", "0"):
        sys.meta_path.insert(0, _Finder())
    _run_the_users_own()
