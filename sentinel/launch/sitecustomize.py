"""Attach Sentinel at the first backward pass, or at the first step of an optimizer.

`sentinel run` puts this directory on PYTHONPATH. Python imports `sitecustomize` when it starts; this one then runs the
user's own, further down the path. It must cost a process that does not use torch next to nothing: it imports only the
standard library, and waits for the process to import torch.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False  # importing it from typing would cost more than all the rest
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

_OPTIMIZER = "torch.optim.optimizer"


class _Finder:
    """A meta path finder that stands before all others until torch's optimizers are imported."""

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
    """Loads as the real loader does, which it leaves as the module's loader, and then registers the hooks."""

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
    from torch._compile import _disable_dynamo  # without it torch.compile would trace into the hook

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
    """Patch torch.autograd.backward for one call. Unless other code has wrapped it meanwhile, the patch is removed
    before the pass begins."""
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
    """Import the `sitecustomize` that Python would have imported without this directory; `site` handles its errors."""
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry) != here]
    del sys.modules[__name__]
    __import__(__name__)


if __name__ == "sitecustomize":
    if os.environ.get("SENTINEL_DISABLED", "0") in ("", "0"):
        sys.meta_path.insert(0, _Finder())
    _run_the_users_own()
