"""Where the thread that trains is: in the loop, beyond it, or in something that takes long.

At some steps the frames that lead to `optimizer.step` are noted, each with the loop around its present instruction, as
the bytecode has it: a backward jump over it. Later, "in the loop" means that one of these loops is still being run
through. A script that has come to its final evaluation is in the same function, beyond the jump; an idle notebook has
no such frame at all. Only code objects are kept: a frame would keep its variables alive.
"""

from __future__ import annotations

import dis
import sys
from types import CodeType, FrameType
from typing import NamedTuple

from sentinel.heartbeat import Place

DEPTH = 200
"""Frames that are looked at, from the innermost."""

_LONG = (
    "torch.serialization",
    "torch.distributed.checkpoint",
    "torch._dynamo.convert_frame",
    "torch._inductor.async_compile",
    "torch._inductor.codecache",
    "torch._inductor.compile_fx",
    "torch.export",
    "torch.onnx",
    "torch.utils.cpp_extension",
    "triton.compiler",
    "safetensors",
    "subprocess",
)
"""Modules that take long with reason: checkpoints, compilers (and not what they compiled), exports, other programs."""
_DEBUGGERS = ("bdb", "pdb", "pydevd", "_pydevd_bundle", "IPython.terminal.debugger", "debugpy", "ipdb")
_KNOWN = 256
_OWN = (
    "sentinel.hooks",
    "torch.optim",
    "torch.utils._contextlib",
    "torch.amp",
    "asyncio",
    "IPython",
    "ipykernel",
    "tornado",
    "code",
    "threading",
)
"""Loops that are not the training's: over parameters, or a notebook's and an event loop's own."""


class Sight(NamedTuple):
    """One look at the stack."""

    place: Place
    signature: int
    """Equal for equal stacks of functions."""


class Whereabouts:
    """See above."""

    def __init__(self) -> None:
        self._path: list[tuple[CodeType, int]] = []
        """The frames that led to the last step that was noted: code, and its instruction then."""
        self._loops: dict[tuple[CodeType, int], tuple[int, int] | None] = {}

    def note(self, frame: FrameType | None) -> None:
        """A step is being taken: remember the way here, from this frame outwards. Costs some microseconds."""
        self._path = [(each.f_code, each.f_lasti) for each in _outwards(frame) if not _of(each, _OWN)]

    def look(self, ident: int) -> Sight:
        """Where this thread is now. From another thread."""
        frames = _outwards(sys._current_frames().get(ident))
        return Sight(self._place(frames), hash(tuple(id(frame.f_code) for frame in frames)))

    def _place(self, frames: list[FrameType]) -> Place:
        if any(_of(frame, _DEBUGGERS) for frame in frames):
            return Place.DEBUGGER
        if not self._path:
            return Place.UNKNOWN
        loops = {code: loop for code, at in self._path if (loop := self._around(code, at)) is not None}
        passed = ((loops.get(frame.f_code), frame.f_lasti) for frame in frames)
        if not any(loop is not None and loop[0] <= at <= loop[1] for loop, at in passed):
            return Place.LEFT
        return Place.LONG if any(_of(frame, _LONG) for frame in frames) else Place.LOOP

    def _around(self, code: CodeType, at: int) -> tuple[int, int] | None:
        if (code, at) not in self._loops:
            if len(self._loops) > _KNOWN:  # code that is made anew again and again
                self._loops.clear()
            self._loops[code, at] = enclosing(code, at)
        return self._loops[code, at]


def enclosing(code: CodeType, at: int) -> tuple[int, int] | None:
    """First and last instruction of the widest loop around one instruction; None where it is in none."""
    widest = None
    for instruction in dis.get_instructions(code):
        if instruction.opcode in dis.hasjrel or instruction.opcode in dis.hasjabs:
            target, jump = instruction.argval, instruction.offset
            if target <= at <= jump and (widest is None or target < widest[0]):
                widest = (target, max(jump, widest[1] if widest else jump))
    return widest


def _outwards(frame: FrameType | None) -> list[FrameType]:
    found: list[FrameType] = []
    while frame is not None and len(found) < DEPTH:
        found.append(frame)
        frame = frame.f_back
    return found


def _of(frame: FrameType, modules: tuple[str, ...]) -> bool:
    name = frame.f_globals.get("__name__") or ""
    return any(name == module or name.startswith(module + ".") for module in modules)
