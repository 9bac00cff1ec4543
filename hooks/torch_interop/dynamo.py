"""Our code out of torch.compile's sight, at no cost where nothing is compiled.

`torch._disable_dynamo` switches dynamo off and on around each call: 0.7 us, and several times as much where its code is
not in the processor's caches. Three of them a step were a fifth of what a step of a fast loop costs.

How deep a thread is in `optimizer.step`: a subclass's step may call its parent's, and torch has the hooks called for
both. Told from the stack, and asked only where that may be so: the end of a step that raised is not seen.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import CodeType, FrameType, FunctionType
from typing import Any, TypeVar

import torch
from torch._compile import _disable_dynamo

_Function = TypeVar("_Function", bound=Callable[..., Any])


def exclude_from_tracing(function: _Function) -> _Function:
    """`function`, which dynamo neither traces into nor compiles. Its code is marked, or its class's where it is an
    object that can be called: not for one of anybody else's.

    Where a graph that is being traced comes to it, the graph breaks there, as at any function that
    `torch.compiler.disable` has marked. Where it is called by bytecode that dynamo made, the interpreter is told to run
    it, and all that it calls, as it is written.
    """
    code: Any = function if isinstance(function, FunctionType) else type(function).__call__
    if not isinstance(code, FunctionType) or not _skip_frames(code.__code__):
        disabled: Any = _disable_dynamo(function)
        return disabled  # type: ignore[no-any-return]
    code._torchdynamo_disable = True  # type: ignore[attr-defined]
    return function


def _skip_frames(code: CodeType) -> bool:
    """Have dynamo leave its frames, and all below them, alone. False in a torch that cannot be told so, and where
    dynamo is not loaded: that takes a second, and no optimizer of torch's is there yet."""
    if "torch._dynamo" not in sys.modules:
        return False
    try:
        from torch._C._dynamo.eval_frame import set_code_exec_strategy
        from torch._dynamo.types import FrameAction, FrameExecStrategy  # type: ignore[attr-defined]

        set_code_exec_strategy(code, FrameExecStrategy(FrameAction.SKIP, FrameAction.SKIP))
    except (ImportError, AttributeError, TypeError):
        return False
    return True


_STEP = torch.optim.Optimizer.profile_hook_step(print).__code__
"""Of the function that torch puts around every step, to call the hooks."""


def depth(optimizer: Any) -> int:
    """Calls of this optimizer's step that the calling thread is in."""
    found = 0
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        found += frame.f_code is _STEP and frame.f_locals.get("self") is optimizer
        frame = frame.f_back
    return found
