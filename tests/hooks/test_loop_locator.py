"""Where a thread is, from its stack: in the training loop, beyond it, or in something that takes long."""

from __future__ import annotations

import asyncio
import code
import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from sentinel.hooks.loop.loop_locator import LoopLocator, enclosing, moves
from sentinel.wire.heartbeat_page import Place


class Watched:
    """Takes the steps of a loop, and looks at the thread that takes them."""

    def __init__(self) -> None:
        self.loop_locator = LoopLocator()
        self.loop_locator.begin(sys._getframe())
        self.seen: list[Place] = []

    def step(self) -> None:
        self.loop_locator.note(sys._getframe(1))

    def look(self) -> None:
        """Look from another thread, as the watchdog does."""
        ident, native, looked = threading.get_ident(), threading.get_native_id(), threading.Event()

        def look() -> None:
            self.seen.append(self.loop_locator.look(ident, native).place)
            looked.set()

        threading.Thread(target=look).start()
        looked.wait()  # and not `join`, which is a place of its own


@pytest.fixture
def watched() -> Watched:
    return Watched()


@contextlib.contextmanager
def autocast() -> Iterator[None]:
    yield


def plain(w: Watched) -> None:
    for _ in range(3):
        w.step()
        w.look()


def behind_a_continue(w: Watched) -> None:
    for step in range(3):
        w.step()
        if step < 2:
            continue
        w.look()


def in_a_handler(w: Watched) -> None:
    for _ in range(3):
        try:
            w.step()
            raise RuntimeError
        except RuntimeError:
            w.look()


def before_the_step(w: Watched) -> None:
    for step in range(3):
        if step == 2:
            w.look()
        with autocast():
            pass
        w.step()


def an_epoch(w: Watched) -> None:
    for _ in range(3):
        with autocast():
            w.step()


def between_epochs(w: Watched) -> None:
    while True:
        an_epoch(w)
        w.look()
        if w.seen:
            break


def forever(w: Watched) -> None:
    batches = iter(range(3))
    while True:
        w.step()
        if next(batches, None) is None:
            return
        w.look()


@pytest.mark.parametrize(
    "loop", [plain, behind_a_continue, in_a_handler, before_the_step, between_epochs, forever], ids=lambda f: f.__name__
)
def test_inside(loop: Callable[[Watched], None], watched: Watched) -> None:
    loop(watched)
    assert set(watched.seen) == {Place.LOOP}


def after_a_with(w: Watched) -> None:
    for _ in range(3):
        with autocast():
            pass
        w.step()
    w.look()


def after_a_handler_that_continues(w: Watched) -> None:
    for _ in range(3):
        try:
            w.step()
        except RuntimeError:
            continue
    w.look()


def on_the_way_out(w: Watched) -> None:
    for step in range(3):
        w.step()
        if step == 2:
            w.look()
            break


def after_another_function(w: Watched) -> None:
    an_epoch(w)
    w.look()


def in_a_later_loop(w: Watched) -> None:
    for _ in range(3):
        w.step()
    for _ in range(3):
        w.look()


def in_a_sweep(w: Watched) -> None:
    for _ in range(2):
        trial = Watched()
        for _ in range(3):
            trial.step()
        trial.look()
        w.seen += trial.seen


@pytest.mark.parametrize(
    "script",
    [in_a_sweep, after_a_with, after_a_handler_that_continues, on_the_way_out, after_another_function, in_a_later_loop],
    ids=lambda f: f.__name__,
)
def test_beyond(script: Callable[[Watched], None], watched: Watched) -> None:
    script(watched)
    assert set(watched.seen) == {Place.LEFT}


def test_a_notebook_that_is_idle_is_beyond_though_a_loop_runs_its_cells(watched: Watched) -> None:
    async def kernel() -> None:
        loop = asyncio.get_running_loop()
        loop.call_soon(an_epoch, watched)
        await asyncio.sleep(0)
        loop.call_soon(watched.look)  # called by the very loop that called the cell
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    asyncio.run(kernel())
    assert watched.seen == [Place.LEFT]


def test_a_prompt_that_waits_for_the_next_line_is_beyond(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ps1", "ps2"):  # the console leaves them behind, and they are taken for a person's prompt
        monkeypatch.setattr(sys, name, "", raising=False)

    class Prompt(code.InteractiveConsole):
        lines = iter(["for _ in range(3): step()", ""])

        def raw_input(self, prompt: str = "") -> str:
            for line in self.lines:
                return line
            watched.look()
            raise EOFError

    Prompt({"step": watched.step}).interact(banner="", exitmsg="")
    assert watched.seen == [Place.LEFT]


def test_a_cell_is_inside_while_it_runs(watched: Watched) -> None:
    source = "for _ in range(3):\n    step()\n    look()\n"
    exec(compile(source, "<cell>", "exec"), {"step": watched.step, "look": watched.look, "__name__": "__main__"})
    assert set(watched.seen) == {Place.LOOP}


def test_a_run_that_is_attached_to_within_its_first_step_has_a_loop(watched: Watched) -> None:
    optim: Any = ModuleType("torch.optim.optimizer")
    exec("def step(function, frame):\n    function(frame())\n", vars(optim))
    watched.loop_locator = LoopLocator()
    for step in range(3):
        if step == 0:
            optim.step(watched.loop_locator.begin, sys._getframe)
        watched.step()
        watched.look()
    assert set(watched.seen) == {Place.LOOP}


def test_another_function_is_another_stack(watched: Watched) -> None:
    stacks = []

    def look() -> None:
        # From the thread itself: another one would find it in `start` at times, and at times in `join`.
        stacks.append(watched.loop_locator.look(threading.get_ident()).stack)

    def one() -> None:
        look()

    def two() -> None:
        look()

    one()
    one()
    two()
    assert stacks[0] == stacks[1]
    assert moves(*stacks[1:])


@pytest.mark.parametrize(
    ("now", "expected"),
    [
        ((1, 2, 3), False),
        ((1, 2, 3, 4, 5), False),
        ((1,), False),
        ((1, 2, 3, 4, 5, 6), True),
        ((1, 2, 4), True),
        ((1, 3, 2, 3), True),
    ],
)
def test_a_thread_moves_unless_it_only_called_a_little_deeper(now: tuple[int, ...], expected: bool) -> None:
    assert moves((1, 2, 3), now) is moves(now, (1, 2, 3)) is expected


def test_the_place_is_unknown_before_the_first_step(watched: Watched) -> None:
    watched.look()
    assert watched.seen == [Place.UNKNOWN]


@pytest.mark.parametrize(
    ("module", "place"),
    [
        ("torch.serialization", Place.LONG),
        ("torch.distributed.checkpoint.state_dict_saver", Place.LONG),
        ("torch._dynamo.convert_frame", Place.LONG),
        ("torch._dynamo.eval_frame", Place.LOOP),  # runs what was compiled
        ("safetensors.torch", Place.LONG),
        ("bdb", Place.DEBUGGER),
        ("shutil", Place.LONG),
        ("http.client", Place.LONG),
        ("s3transfer.futures", Place.LONG),
        ("google.cloud.storage.blob", Place.LONG),
        ("google.protobuf", Place.LOOP),
        ("concurrent.futures._base", Place.AWAITS),
        ("asyncio.runners", Place.AWAITS),
        ("queue", Place.LOOP),  # what fills it may have died
        ("torch.utils.data.dataloader", Place.LOOP),  # a loader that hangs is a hang
    ],
)
def test_modules_on_the_stack_tell_what_takes_long(module: str, place: Place, watched: Watched) -> None:
    inside: Any = ModuleType(module)
    exec("def call(function):\n    function()\n", vars(inside))
    for _ in range(2):
        watched.step()
        inside.call(watched.look)
    assert set(watched.seen) == {place}


def calling(module: str, function: Callable[[], None]) -> None:
    inside: Any = ModuleType(module)
    exec("def call(function):\n    function()\n", vars(inside))
    inside.call(function)


def test_code_that_reads_batches_is_in_the_loop_whatever_it_reads_from(watched: Watched) -> None:
    for _ in range(2):
        watched.step()
        calling("torch.utils.data._utils.fetch", lambda: calling("urllib3.response", watched.look))
    assert set(watched.seen) == {Place.LOOP}


def test_code_that_runs_the_loop_does_not_count_as_within_it(watched: Watched) -> None:
    calling("wandb.agents.pyagent", lambda: plain(watched))
    assert set(watched.seen) == {Place.LOOP}


def looked_at(
    watched: Watched, wait: Callable[[], object], release: Callable[[], object], times: int = 3
) -> set[Place]:
    """Return what another thread, which then releases it, sees of this thread while it waits in a loop."""
    ident, native = threading.get_ident(), threading.get_native_id()
    places: list[Place] = []

    def look() -> None:
        time.sleep(0.3)
        for _ in range(times):
            places.append(watched.loop_locator.look(ident, native).place)
            time.sleep(0.05)
        release()

    for step in range(2):
        watched.step()
        if step == 1:
            threading.Thread(target=look).start()
            wait()
    return set(places)


def test_a_plain_write_that_blocks_is_output(watched: Watched) -> None:
    if not Path(f"/proc/self/task/{threading.get_native_id()}/syscall").exists():
        pytest.skip("this kernel does not show what a thread does in it")
    reader, writer = os.pipe()
    with os.fdopen(reader, "rb", 0) as rest, os.fdopen(writer, "wb", 0) as file:
        assert looked_at(watched, lambda: file.write(b"x" * 70_000), lambda: rest.read(1 << 20)) == {Place.LONG}


def test_a_sleep_is_told_from_a_lock(watched: Watched) -> None:
    if not Path(f"/proc/self/task/{threading.get_native_id()}/syscall").exists():
        pytest.skip("this kernel does not show what a thread does in it")
    lock = threading.Lock()
    lock.acquire()
    assert looked_at(watched, lambda: time.sleep(1), lambda: None) == {Place.AWAITS}
    assert looked_at(watched, lock.acquire, lock.release) == {Place.LOOP}


@pytest.mark.parametrize(
    ("module", "place"), [("torch.serialization", Place.LONG), ("botocore.client", Place.LONG), ("mine", Place.AWAITS)]
)
def test_a_thread_that_waits_for_another_or_a_future_is_where_that_is(
    module: str, place: Place, watched: Watched
) -> None:
    over = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(calling, module, over.wait)
        assert looked_at(watched, future.result, over.set) == {place}
    over.clear()
    thread = threading.Thread(target=calling, args=(module, over.wait))
    thread.start()
    assert looked_at(watched, thread.join, over.set) == {place}


def test_a_thread_that_waits_for_a_moving_worker_moves(watched: Watched) -> None:
    loop_locator, released = watched.loop_locator, threading.Event()
    turns = [threading.Event() for _ in range(2)]

    def one() -> None:
        turns[0].wait()

    def two() -> None:
        turns[1].wait()

    def work() -> None:
        one()
        two()

    stacks = []

    def look(ident: int) -> None:
        for turn in turns:
            time.sleep(0.3)
            stacks.append(loop_locator.look(ident).stack)
            turn.set()
        released.set()

    for step in range(2):
        watched.step()
        if step == 1:
            with ThreadPoolExecutor(1) as pool:
                threading.Thread(target=look, args=(threading.get_ident(),)).start()
                pool.submit(work).result()
    released.wait()
    assert moves(*stacks)


def test_compiling_takes_long_before_the_first_step_too(watched: Watched) -> None:
    inside: Any = ModuleType("torch._inductor.compile_fx")
    exec("def call(function):\n    function()\n", vars(inside))
    inside.call(watched.look)
    assert watched.seen == [Place.LONG]


def test_no_variable_of_the_loop_is_kept_alive(watched: Watched) -> None:
    alive: list[int] = []

    class Batch:
        def __del__(self) -> None:
            alive.append(0)

    def train() -> None:
        batch = Batch()
        for _ in range(2):
            watched.step()
            watched.look()
        assert batch

    train()
    assert alive == [0]


def test_code_without_a_loop_has_none() -> None:
    assert enclosing(after_another_function.__code__, 0) == frozenset()
