"""What acts at a stream's steps besides its probes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from sentinel.hooks.stream import Stream


class Guard(Protocol):
    """What acts at the two ends of a step: `rollback.Restorer`."""

    def enter_step(self, seq: int) -> None:
        """First in the pre-hook."""

    def exit_step(self, seq: int, *, skipped: bool) -> None:
        """Last in the post-hook, or at the end of a `GradScaler.step` that withheld the step."""

    def suspect(self) -> None:
        """This step looks odd."""

    def close(self) -> None:
        """There will be no more steps."""


class Within(Protocol):
    """What takes steps inside a backward pass: `inbackward.Gathering`."""

    captured: bool
    """Whether the present pass is recorded into a CUDA graph."""

    @property
    def whole(self) -> object | None:
        """The stream of all of them. From the first such step on there are no others."""

    def entered(self, part: Stream) -> None:
        """This stream's optimizer steps there."""
