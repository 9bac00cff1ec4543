"""TensorBoard: writes event files in the folder `sentinel`, inside that of the script's `SummaryWriter`.

Not beside its files: in a folder, TensorBoard goes on reading only the newest file. A writer cannot be asked for, so
the first one that adds a scalar is noted: `SummaryWriter.add_scalar` is patched until then.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

from sentinel.hooks.trackers import NAMESPACE, IncidentMark, Summary

NAME = "tensorboard"

_MODULES = ("torch.utils.tensorboard.writer", "tensorboardX.writer")


class TensorBoardFolder:
    """Writes into a folder of TensorBoard's. See `Tracker`."""

    def __init__(self) -> None:
        self._folder = ""
        self._kind: Any = None
        """The script's class of writers."""
        self._writer: Any = None
        """Our writer."""
        self._undo: dict[str, Callable[[], None]] = {}
        """Functions that undo the patch, by module."""

    def look(self) -> None:
        """Patch the script's classes of writers, if there are any, to note its writer."""
        for name in _MODULES:
            kind = getattr(sys.modules.get(name), "SummaryWriter", None)
            if kind is not None and not self._folder and name not in self._undo:
                self._undo[name] = self._watch(kind)

    @property
    def open(self) -> bool:
        """Whether the script's writer is known."""
        return bool(self._folder)

    def write(self, marks: Sequence[IncidentMark], summary: Summary | None) -> int:
        """Write a scalar and a text for each mark."""
        if self._writer is None:
            self._writer = self._kind(self._folder)
        for mark in marks:
            self._writer.add_scalar(mark.key, mark.level, mark.step)
            self._writer.add_text(f"{NAMESPACE}incident", mark.text, mark.step)
        if summary is not None:
            for key, count in summary.counts.items():
                self._writer.add_scalar(key, count, summary.step)
            self._writer.add_text(f"{NAMESPACE}summary", summary.text, summary.step)
        self._writer.flush()
        return len(marks)

    def close(self) -> None:
        """Close our files, and undo the patches."""
        self._restore()
        if self._writer is not None:
            self._writer.close()

    def _watch(self, kind: Any) -> Callable[[], None]:
        original = kind.add_scalar

        @functools.wraps(original)
        def add_scalar(writer: Any, *arguments: Any, **named: Any) -> Any:
            self._note(kind, writer)
            return original(writer, *arguments, **named)

        def undo() -> None:
            if kind.add_scalar is add_scalar:
                kind.add_scalar = original

        kind.add_scalar = add_scalar
        return undo

    def _note(self, kind: Any, writer: Any) -> None:
        folder = getattr(writer, "log_dir", None) or getattr(writer, "logdir", None)
        if folder and not self._folder:
            self._kind, self._folder = kind, f"{str(folder).rstrip('/')}/{NAMESPACE.rstrip('/')}"
            self._restore()

    def _restore(self) -> None:
        for undo in self._undo.values():
            undo()
