"""In the loop, beyond it, or in something that takes long: by the stack of a thread of our own."""

from __future__ import annotations

import bdb
import dis
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType, ModuleType

import pytest

from sentinel.heartbeat import Place
from sentinel.hooks.whereabouts import Sight, Whereabouts, enclosing


class Script(threading.Thread):
    """Runs a function of two stops: it calls `step` in its loop, and `pause` wherever it wants to be looked at."""

    def __init__(self, body: Callable[[Script], None]) -> None:
        super().__init__(daemon=True)
        self.whereabouts = Whereabouts()
        self._body = body
        self._here, self._go = threading.Event(), threading.Event()

    def run(self) -> None:
        self._body(self)

    def step(self) -> None:
        self.whereabouts.note(sys._getframe(1))

    def pause(self) -> None:
        self._here.set()
        assert self._go.wait(20)
        self._go.clear()

    def look(self) -> Sight:
        """At the next pause; then it goes on."""
        assert self._here.wait(20)
        self._here.clear()
        assert self.ident is not None
        sight = self.whereabouts.look(self.ident)
        self._go.set()
        return sight


@contextmanager
def running(body: Callable[[Script], None]) -> Iterator[Script]:
    script = Script(body)
    script.start()
    yield script
    script.join(20)
    assert not script.is_alive()


def test_a_script_is_in_its_loop_and_then_beyond_it_in_one_function() -> None:
    def body(script: Script) -> None:
        script.pause()
        for _ in range(3):
            script.step()
            script.pause()
        script.pause()

    with running(body) as script:
        places = [script.look().place for _ in range(5)]
    assert places == [Place.UNKNOWN, Place.LOOP, Place.LOOP, Place.LOOP, Place.LEFT]


def test_a_loop_that_calls_a_step_function_is_a_loop_while_it_waits_for_data() -> None:
    def train_step(script: Script) -> None:
        script.step()

    def train(script: Script) -> None:
        step = 0
        while step < 2:
            script.pause()  # the loader
            train_step(script)
            step += 1

    def body(script: Script) -> None:
        train(script)
        script.pause()

    with running(body) as script:
        places = [script.look().place for _ in range(3)]
    assert places == [Place.UNKNOWN, Place.LOOP, Place.LEFT]


def test_an_idle_notebook_has_left_the_loop() -> None:
    def cell(script: Script) -> None:
        for _ in range(2):
            script.step()

    def kernel(script: Script) -> None:
        cell(script)
        script.pause()  # waits for the next cell

    with running(kernel) as script:
        assert script.look().place == Place.LEFT


def test_epochs_are_a_loop_with_what_lies_between_them() -> None:
    def epoch(script: Script) -> None:
        for _ in range(2):
            script.step()

    def body(script: Script) -> None:
        for _ in range(1):
            epoch(script)
            script.pause()  # an evaluation
        script.pause()

    with running(body) as script:
        assert [script.look().place for _ in range(2)] == [Place.LOOP, Place.LEFT]


@pytest.mark.parametrize(
    ("module", "place"),
    [
        ("torch.serialization", Place.LONG),
        ("torch._dynamo.convert_frame", Place.LONG),
        ("torch._dynamo.eval_frame", Place.LOOP),
        ("torch.utils.data.dataloader", Place.LOOP),
        (bdb.__name__, Place.DEBUGGER),
    ],
)
def test_modules_on_the_stack_tell_what_takes_long(module: str, place: Place) -> None:
    other = ModuleType(module)
    exec("def call(function):\n    function()\n", vars(other))

    def body(script: Script) -> None:
        for _ in range(1):
            script.step()
            other.call(script.pause)

    with running(body) as script:
        assert script.look().place == place


def test_another_stack_has_another_signature() -> None:
    def one(script: Script) -> None:
        script.pause()

    def two(script: Script) -> None:
        script.pause()

    def body(script: Script) -> None:
        one(script)
        one(script)
        two(script)

    with running(body) as script:
        first, again, other = (script.look().signature for _ in range(3))
    assert first == again != other


def test_the_widest_loop_is_meant() -> None:
    frames: list[tuple[FrameType, int]] = []

    def nested() -> None:
        for _ in range(2):
            for _ in range(2):
                frames.append((sys._getframe(), sys._getframe().f_lasti))

    nested()
    code, at = frames[0][0].f_code, frames[0][1]
    loop = enclosing(code, at)
    assert loop is not None
    assert loop[0] <= at <= loop[1]
    assert enclosing(code, 0) is None
    assert loop[0] < min(target for target in _targets(code) if target != loop[0])


def _targets(code: CodeType) -> set[int]:
    """Where backward jumps lead."""
    jumps = (i for i in dis.get_instructions(code) if i.opcode in dis.hasjrel and i.argval <= i.offset)
    return {jump.argval for jump in jumps}


def test_no_frame_is_kept_alive() -> None:
    class Big:
        pass

    whereabouts, seen = Whereabouts(), list[weakref.ref[Big]]()

    def step() -> None:
        big = Big()
        seen.append(weakref.ref(big))
        whereabouts.note(sys._getframe())

    step()
    assert seen[0]() is None
