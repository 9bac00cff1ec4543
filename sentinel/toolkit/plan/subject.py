"""What is trained."""

from __future__ import annotations

import msgspec


class Point(msgspec.Struct, frozen=True):
    """A moment of a step."""

    activations: float
    """Bytes beyond weights, gradients and optimizer, for one sample."""
    gradients: float
    """Share of the gradients that are there already, 0 to 1."""


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """How activations and gradients of one micro-batch rise and fall."""

    points: tuple[Point, ...]
    """The moments that can be the peak."""
    formula: str
    source: str

    def surplus(self, samples: int, gradients: float, *, kept: bool) -> float:
        """Bytes at the step's peak beyond weights, optimizer and all of `gradients`.

        `kept`: the gradients of earlier micro-batches are there from the start.
        """
        return max(
            point.activations * samples + (0.0 if kept else gradients * (point.gradients - 1)) for point in self.points
        )


class Subject(msgspec.Struct, frozen=True, kw_only=True):
    """A model as a plan needs to know it."""

    name: str
    parameters: int
    trainable: int
    buffers: int = 0
    """Bytes of buffers: running statistics, rotary tables."""
    unit: int = 0
    """Parameters of the largest part that FSDP gathers at once; 0: not known."""
    rest: int = 0
    """Parameters outside the repeated units: embeddings and the head. FSDP gathers them as the root."""
    largest: int = 0
    """Parameters of the largest tensor; 0: not known."""
    linear: int = 0
    """Parameters of the matrices of linear layers in the repeated units; 0: not known."""
    largest_linear: int = 0
    """Of the largest of these; 0: not known."""
    quantised: int = 0
    """Parameters that are stored in NF4."""
    tokens: int = 0
    """Of one sample, for the time that computing takes; 0: not known."""
    plain: Profile | None = None
    checkpointed: Profile | None = None
    """With each repeated unit checkpointed."""
    notes: tuple[str, ...] = ()
