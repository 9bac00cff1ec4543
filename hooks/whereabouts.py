"""Where the thread that trains is: in the loop, beyond it, or in something that takes long.

At some steps the frames that lead to `optimizer.step` are noted, each with its present instruction. Later, "in the
loop" means that one of these functions is where it can come from that instruction and to it again: in a cycle of the
bytecode's flow. A script that has come to its final evaluation is in the same function, beyond the cycle.

A cycle that leads through the call of `attach` is not this run's loop: it would attach anew. So a program that
runs functions in a loop of its own (a sweep of hyperparameters, an event loop that runs a notebook's cells) may be idle
without an alarm. Only code objects are kept: a frame would keep its variables alive.
"""

from __future__ import annotations

import bisect
import dis
import sys
from collections.abc import Iterable, Mapping
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
_HOSTS = (
    "asyncio",
    "anyio",
    "celery",
    "concurrent.futures",
    "ipykernel",
    "IPython",
    "multiprocessing",
    "ray._private",
    "socketserver",
    "threading",
    "tornado",
    "trio",
)
"""They run a function and wait for the next, in a loop of their own that is not the training's."""
_ENDS = {
    "JUMP_BACKWARD",
    "JUMP_BACKWARD_NO_INTERRUPT",
    "JUMP_FORWARD",
    "RAISE_VARARGS",
    "RERAISE",
    "RETURN_CONST",
    "RETURN_VALUE",
}
"""Instructions that never go on with the next one."""
_KNOWN = 256
_TRIFLE = 2
"""Calls by which two stacks may differ and still be one place: `while not event.is_set()` is in that function or out of
it whenever it is looked at. A module's call takes three."""
_STEPPERS = ("torch.optim", "torch.amp")
_OWN = ("sentinel.hooks", "torch.utils._contextlib", *_STEPPERS)
"""Between the loop and the hook: their loops are over parameters."""


class Sight(NamedTuple):
    """One look at the stack."""

    place: Place
    stack: tuple[int, ...]
    """A number for each function, the outermost first."""


def moves(before: tuple[int, ...], now: tuple[int, ...]) -> bool:
    """Whether work goes on from one stack to another: not where one of them only calls a trifle."""
    short, long = sorted((before, now), key=len)
    return len(long) - len(short) > _TRIFLE or long[: len(short)] != short


class Whereabouts:
    """Tells whether the thread that trains is in its training loop, beyond it, or in something that takes long."""

    def __init__(self) -> None:
        self._path: list[tuple[CodeType, int]] = []
        """The frames that led to the last step that was noted: code, and its instruction then."""
        self._loops: dict[tuple[CodeType, int], frozenset[int]] = {}
        self._began: dict[CodeType, set[int]] = {}

    def begin(self, frame: FrameType) -> None:
        """The run is being attached to, from this frame. From within its first step nothing is learned: that is in the
        loop itself."""
        frames = _outwards(frame)
        if not any(_of(each, _STEPPERS) for each in frames):
            for each in frames:
                self._began.setdefault(each.f_code, set()).add(each.f_lasti)

    def note(self, frame: FrameType | None) -> None:
        """A step is being taken: remember the way here, from this frame outwards. Costs some microseconds.

        As far as to the code of a module, which is a script or a notebook's cell: what runs that is a host.
        """
        path = []
        for each in _outwards(frame):
            if _of(each, _HOSTS):
                break
            if not _of(each, _OWN):
                path.append((each.f_code, each.f_lasti))
            if each.f_code.co_name == "<module>":
                break
        self._path = path

    def look(self, ident: int) -> Sight:
        """Where this thread is now. From another thread."""
        frames = _outwards(sys._current_frames().get(ident))
        return Sight(self._place(frames), tuple(id(frame.f_code) for frame in reversed(frames)))

    def _place(self, frames: list[FrameType]) -> Place:
        if any(_of(frame, _DEBUGGERS) for frame in frames):
            return Place.DEBUGGER
        loops = {code: self._around(code, at) for code, at in self._path}
        if self._path and not any(frame.f_lasti in loops.get(frame.f_code, ()) for frame in frames):
            return Place.LEFT
        if any(_of(frame, _LONG) for frame in frames):
            return Place.LONG
        return Place.LOOP if self._path else Place.UNKNOWN

    def _around(self, code: CodeType, at: int) -> frozenset[int]:
        if (code, at) not in self._loops:
            if len(self._loops) > _KNOWN:  # code that is made anew again and again
                self._loops.clear()
            self._loops[code, at] = enclosing(code, at, self._began.get(code, ()))
        return self._loops[code, at]


def enclosing(code: CodeType, at: int, avoiding: Iterable[int] = ()) -> frozenset[int]:
    """The bytecode offsets of all loops around one: of what it leads to, and what leads to it again, other than through
    those that are to be avoided."""
    onwards = _flow(code)
    offsets = list(onwards)
    start = offsets[bisect.bisect_right(offsets, at) - 1]
    for each in avoiding:
        onwards[offsets[bisect.bisect_right(offsets, each) - 1]] = []
    backwards: dict[int, list[int]] = {}
    for offset, following in onwards.items():
        for each in following:
            backwards.setdefault(each, []).append(offset)
    loops = _reached(onwards, start) & _reached(backwards, start)
    # A frame that calls stands at the last cache of its instruction.
    ends = [*offsets[1:], len(code.co_code)]
    return frozenset(
        each for offset, end in zip(offsets, ends, strict=True) if offset in loops for each in range(offset, end, 2)
    )


def _flow(code: CodeType) -> dict[int, list[int]]:
    """Instruction -> those that may come next, handlers of exceptions with them. In their order."""
    bytecode = dis.Bytecode(code)
    instructions = list(bytecode)
    offsets = [instruction.offset for instruction in instructions]
    following: dict[int, list[int]] = {}
    for index, instruction in enumerate(instructions):
        after = following[instruction.offset] = []
        if instruction.opname not in _ENDS:
            after += offsets[index + 1 : index + 2]
        if instruction.opcode in dis.hasjrel or instruction.opcode in dis.hasjabs:
            after.append(offsets[bisect.bisect_left(offsets, instruction.argval)])
    for entry in bytecode.exception_entries:  # type: ignore[attr-defined]
        for offset in offsets[bisect.bisect_left(offsets, entry.start) : bisect.bisect_left(offsets, entry.end)]:
            following[offset].append(entry.target)
    return following


def _reached(following: Mapping[int, list[int]], start: int) -> frozenset[int]:
    """From an instruction; it is one of them only if it is come back to."""
    found: set[int] = set()
    open_ends = [start]
    while open_ends:
        fresh = [each for each in following.get(open_ends.pop(), ()) if each not in found]
        found.update(fresh)
        open_ends += fresh
    return frozenset(found)


def _outwards(frame: FrameType | None) -> list[FrameType]:
    found: list[FrameType] = []
    while frame is not None and len(found) < DEPTH:
        found.append(frame)
        frame = frame.f_back
    return found


def _of(frame: FrameType, modules: tuple[str, ...]) -> bool:
    name = frame.f_globals.get("__name__")
    return isinstance(name, str) and any(name == module or name.startswith(module + ".") for module in modules)
