"""What an examined training loop did, as `sentinel.hooks.examine` writes it and `sentinel.toolkit.doctor` judges it."""

from __future__ import annotations

from typing import Any

import msgspec


class ExaminedLoop(msgspec.Struct, kw_only=True):
    """The calls of one process's loop, for a few steps of its first optimizer, and the values that were in them."""

    steps: list[list[str]] = msgspec.field(default_factory=list)
    """The events of each step, in their order: `zero_grad`, `forward`, `backward`, `clip`, `step` and so on."""
    after: list[str] = msgspec.field(default_factory=list)
    """The events after the last step."""
    seconds: float = 0.0
    """Time of the steps from the second on."""
    error: str = ""
    """What ended the script early; empty if nothing did."""
    ended: bool = False
    """Whether the script came to its end."""
    anomaly: bool = False
    """Whether autograd's anomaly detection is on."""
    forward: dict[str, Any] | None = None
    """The first forward pass: its autocast and its batch's size."""
    loaders: dict[str, dict[str, Any]] = msgspec.field(default_factory=dict)
    """Settings of each DataLoader that was iterated over, and whether a training pass used it, by key."""
    inputs: dict[str, dict[str, float]] = msgspec.field(default_factory=dict)
    """Range of the data that a trained layer gets, by its name."""
    post_norm: dict[str, int] = msgspec.field(default_factory=dict)
    """Class of a layer whose output is that of its norm -> number of such layers."""
    not_finite: dict[str, Any] | None = None
    """The first loss that was not finite: its step, the optimizer steps before it, (step, value) of the first and the
    last loss of its kind before it, and the first input with NaN or infinity up to then."""
    rates: list[list[float]] = msgspec.field(default_factory=list)
    """Learning rates at each optimizer step, by parameter group."""
    waits: list[float] = msgspec.field(default_factory=list)
    """Seconds that the loop waited for each batch."""
    no_gradient: list[list[int]] = msgspec.field(default_factory=list)
    """At each optimizer step, the numbers of parameters, of those with a gradient, and of those, among at most 64, with
    one that is not zero."""
    uncleared: int = 0
    """Optimizer steps with gradients to which a backward pass added after they had been applied."""
    divided: int = 0
    undivided: int = 0
    """Losses with and without a division or product at their root."""
    softmax_before_loss: bool = False
    schedulers: int = 0
    """Number of learning-rate schedulers that were made."""
    closure: bool = False
    """Whether a step had a closure."""
    held: dict[str, Any] | None = None
    """The variable that keeps the losses of earlier steps."""
