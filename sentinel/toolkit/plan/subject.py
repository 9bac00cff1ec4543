"""The model to be trained, as a plan needs to know it."""

from __future__ import annotations

import msgspec


class Point(msgspec.Struct, frozen=True):
    """The memory at a moment of a step."""

    activations: float
    """Bytes beyond weights, gradients and optimizer, for one sample."""
    gradients: float
    """Share of the gradients that exist already, 0 to 1."""
    fixed: float = 0.0
    """Further bytes, as many for any number of samples: copies of weights in 16 bits, a gradient in the making."""


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """How activations and gradients of one micro-batch rise and fall."""

    points: tuple[Point, ...]
    """The moments that can be the peak."""
    formula: str
    source: str

    def surplus(self, samples: int, gradients: float, *, kept: bool, whole: bool) -> float:
        """Return the bytes at the step's peak beyond weights, optimizer and all of `gradients`.

        `kept`: the gradients of earlier micro-batches exist from the start. `whole`: each weight is whole on each GPU,
        so that its copies and its gradient are, too.
        """
        return max(
            point.activations * samples
            + (point.fixed if whole else 0.0)
            + (0.0 if kept else gradients * (point.gradients - 1))
            for point in self.points
        )


class Subject(msgspec.Struct, frozen=True, kw_only=True):
    """A model as a plan needs to know it."""

    name: str
    parameters: int
    trainable: int
    buffers: int = 0
    """Bytes of buffers: running statistics, rotary tables."""
    unit: int = 0
    """Parameters of the largest part that FSDP gathers at once; 0: unknown."""
    rest: int = 0
    """Parameters outside the repeated units: embeddings and the head. FSDP gathers them as the root."""
    largest: int = 0
    """Parameters of the largest tensor; 0: unknown."""
    linear: int = 0
    """Parameters of the matrices of linear layers in the repeated units; 0: unknown."""
    largest_linear: int = 0
    """Parameters of the largest of these; 0: unknown."""
    quantised: int = 0
    """Number of parameters stored in NF4."""
    tokens: int = 0
    """Tokens of one sample, for the time of computing; 0: unknown."""
    active_share: float = 1.0
    """Share of the parameters that a token goes through, for the time of computing: not all in a mixture of experts."""
    plain: Profile | None = None
    checkpointed: Profile | None = None
    """The profile with each repeated unit checkpointed."""
    notes: tuple[str, ...] = ()
