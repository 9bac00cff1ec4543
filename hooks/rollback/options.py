"""The options by which the user arms rollback."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from sentinel import wire
from sentinel.errors import AttachError
from sentinel.hooks.snapshot.capture import Stateful


@dataclass(frozen=True, kw_only=True)
class Rollback:
    """Arms rollback. Raises AttachError where a value makes no sense."""

    every: int = 200
    """Steps from one snapshot to the next."""
    keep: int = 2
    """Number of snapshots in host memory, each of one model + optimizer state."""
    margin: int = 100
    """Steps that the run must have stayed healthy after a snapshot for it to be good."""
    skip_batches: int = 0
    """Number of batches to leave out after a rollback, besides those already used."""
    lr_factor: float = 1.0
    """Learning rates are multiplied by this at each rollback, until the process ends: a resumed run has its own rates
    again."""
    budget: int = 3
    """Most rollbacks in one stretch of trouble; then the run is stopped. A rollback no longer counts once the run has
    been healthy after it for `10 * margin` steps, and for `keep * every + margin`."""
    state: Mapping[str, Stateful] = field(default_factory=lambda: MappingProxyType({}))
    """Anything else that belongs to the run and has state_dict / load_state_dict: an EMA, a sampler."""

    directory: str | os.PathLike[str] | None = None
    """Where snapshots are kept on disk too, for `sentinel.resume`: one directory for each run, yours alone. Over
    several nodes, one that all share, or a disk of each node's own."""
    disk_every: int = 5
    """Every how many snapshots one is written to disk. Only good ones are, `margin` steps after they were taken."""
    disk_keep: int = 2
    """Number of snapshots on disk. Over several nodes each keeps some more (docs/rollback.md)."""

    def __post_init__(self) -> None:
        for name, least in (("every", 1), ("keep", 2), ("margin", 0), ("skip_batches", 0), ("budget", 0),
                            ("disk_every", 1), ("disk_keep", 1)):  # fmt: skip
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                why = ": while one is being overwritten the other must serve" if name == "keep" else ""
                raise AttachError(f"Rollback({name}={value!r}): must be a whole number of at least {least}{why}")
        if not isinstance(self.lr_factor, int | float) or not 0 < self.lr_factor <= 1:
            raise AttachError(f"Rollback(lr_factor={self.lr_factor!r}): must be over 0 and at most 1 (1: unchanged)")
        if self.margin > self.every * (self.keep - 1):
            raise AttachError(
                f"Rollback(margin={self.margin}): with every={self.every} and keep={self.keep} no snapshot would live "
                f"long enough to be good; margin must be at most every * (keep - 1) = {self.every * (self.keep - 1)}"
            )
        check_state(self.state, "Rollback")

    def terms(self) -> wire.RollbackTerms:
        """Return the options in the form that the hello sends to the daemon."""
        return wire.RollbackTerms(
            every=self.every, keep=self.keep, margin=self.margin, budget=self.budget,
            skip_batches=self.skip_batches, lr_factor=self.lr_factor,
            disk_every=self.disk_every if self.directory is not None else 0, disk_keep=self.disk_keep,
        )  # fmt: skip


def check_state(state: object, call: str) -> None:
    """Raise AttachError unless `state`, given to `call`, has names, and objects that can be saved and loaded."""
    if not isinstance(state, Mapping):
        raise AttachError(f"{call}(state=...): a {type(state).__name__} has no names; write state={{'ema': ema}}")
    for name, value in state.items():
        if not (callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))):
            raise AttachError(
                f"{call}(state={{{name!r}: ...}}): a {type(value).__name__} has no state_dict and "
                "load_state_dict; give it both, or leave it out"
            )
