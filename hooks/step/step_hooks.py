"""The two hooks of an optimizer. They own its stream and nothing else does, so that it dies with the optimizer."""

from __future__ import annotations

from typing import Any, Protocol


class StepEvents(Protocol):
    """A stream, as its hooks know it."""

    def begins(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """`optimizer.step(*args, **kwargs)` begins."""

    def ends(self) -> None:
        """It is over."""


class StepHook:
    """Belongs to a stream."""

    def __init__(self, stream: StepEvents) -> None:
        self.stream = stream


class BeforeStep(StepHook):
    """Before a step."""

    def __call__(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.stream.begins(args, kwargs)


class AfterStep(StepHook):
    """After it."""

    def __call__(self, *_: Any) -> None:
        self.stream.ends()
