"""Locates the training thread: in the loop, beyond it, in something that takes long, or waiting for another thread.

At some steps the frames that lead to `optimizer.step` are noted, each with its present instruction. Later, "in the
loop" means that one of these functions is at an instruction that is reachable from the noted one and leads back to it:
in a cycle of the bytecode's flow. A script that has come to its final evaluation is in the same function, beyond the
cycle.

A cycle that leads through the call of `attach` is not this run's loop: it would attach again. So a program that
runs functions in a loop of its own (a sweep of hyperparameters, an event loop that runs a notebook's cells) may be idle
without an alarm. Only code objects are kept: a frame would keep its variables alive.
"""

from __future__ import annotations

import bisect
import dis
import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from threading import Thread, get_ident
from types import CodeType, FrameType
from typing import NamedTuple

from sentinel.wire.heartbeat_page import Place

DEPTH = 200
"""Most frames that are examined, from the innermost."""

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
"""Modules that take long with reason: checkpoints, compilers (not the code they compiled), exports, subprocesses."""
_OUTPUT = (
    "aiohttp",
    "boto3",
    "botocore",
    "fsspec",
    "ftplib",
    "gcsfs",
    "google.cloud.storage",
    "google.resumable_media",
    "gzip",
    "http.client",
    "httpcore",
    "httpx",
    "huggingface_hub",
    "mlflow",
    "numpy.lib._format_impl",
    "numpy.lib._npyio_impl",
    "numpy.lib.format",
    "numpy.lib.npyio",
    "paramiko",
    "pickle",
    "requests",
    "s3fs",
    "s3transfer",
    "shutil",
    "ssl",
    "tarfile",
    "urllib.request",
    "urllib3",
    "wandb",
    "zipfile",
)
"""Modules that write files, or send them, within the loop. Some also run around it: a sweep's agent, autologging."""
_DATA = ("datasets", "streaming", "torch.utils.data", "webdataset")
"""Modules that load batches. They read as often as the loop steps: how long it takes is known from the run itself."""
_AWAITED = ("asyncio", "concurrent.futures", "multiprocessing.popen_fork", "multiprocessing.process", "torch.futures")
"""Modules in which a thread waits for another thread or process."""
_WORKERS = "concurrent.futures.thread"
_WRITES = {
    "x86_64": frozenset((1, 3, 18, 20, 26, 40, 44, 46, 74, 75, 77, 82, 162, 263, 264, 275, 277, 285, 296, 306, 316,
                         326, 328)),
    "aarch64": frozenset((35, 38, 46, 47, 57, 64, 66, 68, 70, 71, 76, 81, 82, 83, 84, 206, 211, 227, 267, 276, 285,
                          287)),
}  # fmt: skip
"""System calls that write, send, sync, close or rename. A hanging file system shows there, in no Python frame."""
_SLEEPS = {"x86_64": frozenset((35, 230)), "aarch64": frozenset((101, 115))}
_TERMINAL = (1, 2)
"""stdout and stderr: a reader that does not read them is no slow file system."""
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
"""Modules that run a function and wait for the next, in a loop of their own that is not the training loop."""
_ENDS = {
    "JUMP_BACKWARD",
    "JUMP_BACKWARD_NO_INTERRUPT",
    "JUMP_FORWARD",
    "RAISE_VARARGS",
    "RERAISE",
    "RETURN_CONST",
    "RETURN_VALUE",
}
"""Instructions that never continue with the next one."""
_KNOWN = 256
_TRIFLE = 2
"""Most calls by which two stacks may differ and still be one place: a loop over `event.is_set()` is seen in that
function or out of it by chance. A call of a module takes three."""
_STEPPERS = ("torch.optim", "torch.amp")
_PASSES = ("torch._tensor", "torch.autograd")
_OWN = ("sentinel.hooks", "torch.utils._contextlib", *_STEPPERS)
"""Modules between the loop and the hook: their loops are over parameters."""


class Location(NamedTuple):
    """Result of one look at the stack."""

    place: Place
    stack: tuple[int, ...]
    """A number per function, outermost first; then those of the threads that this one waits for."""


def moves(before: tuple[int, ...], now: tuple[int, ...]) -> bool:
    """Whether work goes on from one stack to another: not where one only calls up to `_TRIFLE` functions more."""
    short, long = sorted((before, now), key=len)
    return len(long) - len(short) > _TRIFLE or long[: len(short)] != short


class LoopLocator:
    """Tells whether the training thread is in its training loop, beyond it, or in something that takes long."""

    def __init__(self) -> None:
        self._path: list[tuple[CodeType, int]] = []
        """Code of the frames that led to the last step that was noted, with the instruction of each."""
        self._loops: dict[tuple[CodeType, int], frozenset[int]] = {}
        self._began: dict[CodeType, set[int]] = {}

    def begin(self, frame: FrameType) -> None:
        """Note that the run is attached to from this frame. Nothing is learned from an `attach` within its first step
        or backward pass: that is in the loop itself."""
        frames = _outwards(frame)
        if not any(_belongs_to(each, _STEPPERS + _PASSES) for each in frames):
            for each in frames:
                self._began.setdefault(each.f_code, set()).add(each.f_lasti)

    def note(self, frame: FrameType | None) -> None:
        """Note the way to the step that is being taken, from this frame outwards. Costs some microseconds.

        It ends at the code of a module, which is a script or a notebook's cell: what runs that is a host.
        """
        path = []
        for each in _outwards(frame):
            if _belongs_to(each, _HOSTS):
                break
            if not _belongs_to(each, _OWN):
                path.append((each.f_code, each.f_lasti))
            if each.f_code.co_name == "<module>":
                break
        self._path = path

    def look(self, ident: int, native: int = 0) -> Location:
        """Return where this thread is now. Called on another thread. `native`: its id in the kernel."""
        every = sys._current_frames()
        frames = _outwards(every.get(ident))
        every.pop(get_ident(), None)  # this frame would hold itself, and so keep all frames and their variables
        place = self._place(frames)
        others: list[list[FrameType]] = []
        if place == Place.LOOP:
            place, others = self._locate_in_loop(frames, native, every)
        stack = [id(frame.f_code) for each in (frames, *others) for frame in reversed(each)]
        return Location(place, tuple(stack))

    def _locate_in_loop(
        self, frames: list[FrameType], native: int, every: Mapping[int, FrameType]
    ) -> tuple[Place, list[list[FrameType]]]:
        """Return what a thread in the loop does, and the stacks of the threads that it waits for."""
        own = {code for code, _ in self._path}
        depth = next((depth for depth, frame in enumerate(frames) if frame.f_code in own), len(frames))
        inner = frames[:depth]
        if any(_belongs_to(frame, _DATA) for frame in inner):
            return Place.LOOP, []
        call = _system_call(native)
        if call == "writes" or any(_belongs_to(frame, _OUTPUT) for frame in inner):
            return Place.LONG, []
        others = _list_awaited_stacks(inner, every)
        if any(_belongs_to(frame, _LONG + _OUTPUT) for each in others for frame in each):
            return Place.LONG, []
        waits = call == "sleeps" or others or any(_belongs_to(frame, _AWAITED) for frame in inner)
        return Place.AWAITS if waits else Place.LOOP, others

    def _place(self, frames: list[FrameType]) -> Place:
        if any(_belongs_to(frame, _DEBUGGERS) for frame in frames):
            return Place.DEBUGGER
        loops = {code: self._around(code, at) for code, at in self._path}
        if self._path and not any(frame.f_lasti in loops.get(frame.f_code, ()) for frame in frames):
            return Place.LEFT
        if any(_belongs_to(frame, _LONG) for frame in frames):
            return Place.LONG
        return Place.LOOP if self._path else Place.UNKNOWN

    def _around(self, code: CodeType, at: int) -> frozenset[int]:
        if (code, at) not in self._loops:
            if len(self._loops) > _KNOWN:  # code objects that are created again and again
                self._loops.clear()
            self._loops[code, at] = enclosing(code, at, self._began.get(code, ()))
        return self._loops[code, at]


def enclosing(code: CodeType, at: int, avoiding: Iterable[int] = ()) -> frozenset[int]:
    """Return the bytecode offsets of all loops around offset `at`: of the instructions that it leads to and that lead
    back to it, other than through those to be avoided."""
    onwards = _flow(code)
    offsets = list(onwards)
    start = offsets[bisect.bisect_right(offsets, at) - 1]
    for each in avoiding:
        onwards[offsets[bisect.bisect_right(offsets, each) - 1]] = []
    backwards: dict[int, list[int]] = {}
    for offset, following in onwards.items():
        for each in following:
            backwards.setdefault(each, []).append(offset)
    loops = _list_reachable(onwards, start) & _list_reachable(backwards, start)
    # During a call, a frame's offset is that of the last cache entry of its instruction.
    ends = [*offsets[1:], len(code.co_code)]
    return frozenset(
        each for offset, end in zip(offsets, ends, strict=True) if offset in loops for each in range(offset, end, 2)
    )


def _flow(code: CodeType) -> dict[int, list[int]]:
    """Return instruction -> instructions that may come next, exception handlers included, in order."""
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


def _list_reachable(following: Mapping[int, list[int]], start: int) -> frozenset[int]:
    """Return the instructions reachable from `start`; `start` is one only if the flow comes back to it."""
    found: set[int] = set()
    open_ends = [start]
    while open_ends:
        fresh = [each for each in following.get(open_ends.pop(), ()) if each not in found]
        found.update(fresh)
        open_ends += fresh
    return frozenset(found)


def _list_awaited_stacks(inner: list[FrameType], every: Mapping[int, FrameType]) -> list[list[FrameType]]:
    """Return the stacks of the threads that these frames wait for: the joined thread, or, where they wait for a future,
    all busy workers, since a future does not know its thread."""
    joined = next(
        (frame for frame in inner if _belongs_to(frame, ("threading",)) and frame.f_code.co_name == "join"), None
    )
    if joined is not None:
        thread = joined.f_locals.get("self")
        frame = every.get(thread.ident or 0) if isinstance(thread, Thread) else None
        return [_outwards(frame)] if frame is not None else []
    if not any(_belongs_to(frame, ("concurrent.futures", "asyncio")) for frame in inner):
        return []
    found = []
    for _, frame in sorted(every.items(), key=lambda pair: pair[0]):
        frames = _outwards(frame)
        runs = next(
            (n for n, each in enumerate(frames) if _belongs_to(each, (_WORKERS,)) and each.f_code.co_name == "run"), 0
        )
        found += [frames[:runs]] if runs else []
    return found


def _system_call(native: int) -> str:
    """Return what a thread of this process does in the kernel: `writes`, `sleeps`, or an empty text for all else."""
    machine = os.uname().machine
    try:
        words = Path(f"/proc/self/task/{native}/syscall").read_text().split()
        number = int(words[0])
        if number in _WRITES.get(machine, ()) and int(words[1], 16) not in _TERMINAL:
            return "writes"
        return "sleeps" if number in _SLEEPS.get(machine, ()) else ""
    except (OSError, ValueError, IndexError):  # the thread is running, or reading is not permitted
        return ""


def _outwards(frame: FrameType | None) -> list[FrameType]:
    found: list[FrameType] = []
    while frame is not None and len(found) < DEPTH:
        found.append(frame)
        frame = frame.f_back
    return found


def _belongs_to(frame: FrameType, modules: tuple[str, ...]) -> bool:
    name = frame.f_globals.get("__name__")
    return isinstance(name, str) and any(name == module or name.startswith(module + ".") for module in modules)
