"""The two hooks of an optimizer. They own its stream and nothing else does, so that it dies with the optimizer."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch._C import _current_graph_task_id as present_pass
from torch._C import _is_any_autocast_enabled as any_autocast
from torch._C import _is_torch_function_mode_enabled as any_mode

from sentinel.heartbeat import Work
from sentinel.hooks import contents, fast_path_native, kept, losses, readout
from sentinel.hooks.fast_path_native import called, learned
from sentinel.hooks.step_queue import QUEUE_STEPS


class Stepped(Protocol):
    """A stream, as its hooks know it."""

    def begins(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """`optimizer.step(*args, **kwargs)` begins."""

    def ends(self) -> None:
        """It is over."""


@learned
class StepHook:
    """Belongs to a stream."""

    __slots__ = ("stream",)

    def __init__(self, stream: Stepped) -> None:
        self.stream = stream


@called("step_begins")
class Enter(StepHook):
    """Before a step."""

    def __call__(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.stream.begins(args, kwargs)


@called("step_ends")
class Leave(StepHook):
    """After it."""

    def __call__(self, *_: Any) -> None:
        self.stream.ends()


if not readout.CUDA:  # where a stream may be recording, and losses come late
    fast_path_native.know(
        {
            "Record": readout.Record,
            "Tensor": torch.Tensor,
            "any_autocast": any_autocast,
            "any_mode": any_mode,
            "is_grad_enabled": torch.is_grad_enabled,
            "present_pass": present_pass,
            "scaled": losses.scaled,
            "BACKWARD": Work.BACKWARD,
            "BATCH": Work.BATCH,
            "FORWARD": Work.FORWARD,
            "STEP": Work.STEP,
        },
        fast_seconds=kept.FAST_SECONDS,
        batch_bytes=kept.BATCH_BYTES,
        queue_steps=QUEUE_STEPS,
        burst=contents.BURST,
        burst_every=contents.BURST_EVERY,
    )
