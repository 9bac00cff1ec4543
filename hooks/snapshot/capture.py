"""How a part of a run's state is taken and put back.

A part takes itself with `Capture.later` (tensors that change only inside a step of the first optimizer, at whose exit
snapshots are taken: they may be copied while the next forward pass runs) or `Capture.now` (all else), and puts back
what it took.
"""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

from sentinel.hooks.snapshot.state_tree import Cell, Copies, freeze_tree


class Stateful(Protocol):
    """Anything with torch's way to save itself."""

    def state_dict(self) -> Any: ...
    def load_state_dict(self, state_dict: Any, /) -> Any: ...


class Capture:
    """Gathers the cells of one snapshot."""

    def __init__(self) -> None:
        self.stable: list[Cell] = []
        self.volatile: list[Cell] = []

    def later(self, value: Any, name: str) -> Any:
        """Freeze what changes only inside a step."""
        return freeze_tree(value, name, lambda path, tensor: self._cell(self.stable, path, tensor, judged=True))

    def now(self, value: Any, name: str, *, judged: bool = False) -> Any:
        """Freeze what may change as soon as the step is over."""
        return freeze_tree(value, name, lambda path, tensor: self._cell(self.volatile, path, tensor, judged=judged))

    def _cell(self, cells: list[Cell], name: str, tensor: Tensor, *, judged: bool) -> Cell:
        cells.append(Cell(name, tensor, judged=judged))
        return cells[-1]


class Immediate(Capture):
    """Copies each tensor into host memory as it comes to it, for what is put back a moment later, or never."""

    def _cell(self, cells: list[Cell], name: str, tensor: Tensor, *, judged: bool) -> Cell:
        cell = Cell(name, tensor, judged=judged)
        assert cell.source is not None
        cell.kept, cell.source = cell.source.to("cpu", copy=True), None
        return cell


class Part(Protocol):
    """One part of the state."""

    @property
    def name(self) -> str:
        """Unique in the run, and the same when it is started again."""

    @property
    def late(self) -> bool:
        """Whether the loop still changes it after the step: schedulers, the scaler, an EMA. A rollback puts it back as
        it was at the exit of the step, since the loop will do to it what it did then; a run that is started again
        begins with the next iteration, and needs it as it was at the end of this one."""

    @property
    def foreign(self) -> bool:
        """Whether to put it back runs code that is not ours, and may raise."""

    def take(self, capture: Capture) -> Any:
        """What is to be kept, with cells for the tensors."""

    def check(self, kept: Any) -> None:
        """Raises RollbackError where it cannot be put back. Touches nothing."""

    def give(self, kept: Any, copies: Copies) -> None:
        """Put it back. Tensors that keep their storage are only planned in `copies`."""

    def export_named(self, kept: Any) -> Any:
        """What was taken, by names: nothing in it belongs to this process."""

    def import_named(self, named: Any) -> Any:
        """The reverse, in the process that goes on. Raises RollbackError where something has no such name here."""
