"""Worker threads, started before they are needed, each with one task at a time; and a line about a wait without end.

`Thread.start()` waits without a bound for the first line of the new thread. Where Python finds no memory for that line
(`ulimit -v`), it never comes, and the training loop would stand still. So threads are started before the loop, by
`start_thread`, which waits for `START_SECONDS` at most.
"""

from __future__ import annotations

import _thread
import atexit
import contextlib
import functools
import threading
import time
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import Any

from sentinel.hooks.core import faults

EXIT_SECONDS = 60.0
"""Seconds that process exit waits for its threads: one may hang, say on a file system that does not answer."""
START_SECONDS = 5.0
"""Seconds that a new thread may take to begin. It takes 0.1 ms where there is memory for it."""
LATE_SECONDS = 30.0
"""Seconds after which a line says what the training thread waits for, such as a file server that hangs."""
_LOOK_SECONDS = 1.0
"""Seconds between two checks that the thread that a task waits for is still alive."""

_finishing: dict[threading.Thread, SimpleQueue[Task | None]] = {}
"""Thread -> its queue, of the threads that process exit waits for."""


def start_thread(thread: threading.Thread) -> None:
    """Start `thread`, or raise RuntimeError after `START_SECONDS` at most."""
    began = threading.Event()
    refused: list[Exception] = []

    def start() -> None:
        try:
            thread.start()
        except Exception as error:
            refused.append(error)
        began.set()

    _thread.start_new_thread(start, ())  # `start` may never return, where the new thread never runs its first line
    if not began.wait(START_SECONDS):
        raise RuntimeError(f"{thread.name}: the thread did not begin within {START_SECONDS:g} s")
    if refused:
        raise refused[0]


@contextlib.contextmanager
def say_if_late(doing: str, *, speaks: bool) -> Iterator[None]:
    """Print what the block is doing if it takes longer than `LATE_SECONDS`. It goes on all the same: a system call
    cannot be given up. `speaks`: False on ranks that do the same beside one that prints."""
    timer: threading.Timer | None = None
    if speaks:
        with contextlib.suppress(RuntimeError, MemoryError):  # the block runs without the line
            late = (
                f"{doing} has taken {LATE_SECONDS:g} s so far and goes on; if it does not end, check that file system"
            )
            timer = threading.Timer(LATE_SECONDS, faults.say, (late,))
            timer.daemon = True
            start_thread(timer)
    try:
        yield
    finally:
        if timer is not None:
            timer.cancel()


class Task:
    """A call that a worker makes on its thread."""

    def __init__(self, run: Callable[[], object], thread: threading.Thread) -> None:
        self._run: Callable[[], object] | None = run
        self._thread = thread
        self._done = threading.Event()

    def run(self) -> None:
        """Run it, on the worker's thread. What the call holds is released before a waiting thread goes on."""
        run, self._run = self._run, None
        try:
            if run is not None:
                run()
        except BaseException:
            faults.swallow(self._thread.name, "without it")
        finally:
            del run
            self._done.set()

    @property
    def over(self) -> bool:
        """Whether it is done, or never will be: its thread has ended, or was lost in a fork of the process."""
        return self._done.is_set() or not self._thread.is_alive()

    def wait(self, seconds: float = float("inf")) -> bool:
        """Wait until it is over, for `seconds` at most; return whether it is done."""
        until = time.monotonic() + seconds
        while not self.over and (left := until - time.monotonic()) > 0:
            self._done.wait(min(left, _LOOK_SECONDS))
        return self._done.is_set()


class Worker:
    """One thread. It sleeps while there is nothing to do, and ends when the Worker object is deleted."""

    def __init__(self, name: str, *, finishes: bool = False) -> None:
        """`finishes`: process exit waits for its tasks, for `EXIT_SECONDS` at most. A task inside torch would abort the
        process if it returned to an interpreter that is gone; tasks of other workers are dropped."""
        self._name, self._finishes = name, finishes
        self._queue = SimpleQueue[Task | None]()
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()

    @property
    def waiting(self) -> int:
        """Number of tasks that have not begun."""
        return self._queue.qsize()

    def start(self) -> None:
        """Start the thread ahead of its first task. If that fails, `submit` tries again."""
        with contextlib.suppress(RuntimeError, MemoryError):
            self._ensure_thread()

    def submit(self, run: Callable[[], object]) -> Task:
        """Queue `run` after what was submitted before. Raises RuntimeError if no thread can be started."""
        task = Task(run, self._ensure_thread())
        self._queue.put(task)
        return task

    def _ensure_thread(self) -> threading.Thread:
        with self._starting:
            if self._thread is None or not self._thread.is_alive():
                self._begin_thread()
            assert self._thread is not None
            return self._thread

    def _begin_thread(self) -> None:
        queue = SimpleQueue[Task | None]()  # a new one, so that a thread that begins too late finds its end there
        thread = threading.Thread(target=_serve, args=(queue,), name=self._name, daemon=True)
        try:
            start_thread(thread)
        except BaseException:
            queue.put(None)
            raise
        self._queue, self._thread = queue, thread
        if self._finishes:
            _finishing[thread] = queue

    def close(self) -> None:
        """Have the thread end once it has done what was submitted."""
        self._queue.put(None)

    def __del__(self) -> None:
        self.close()


def _serve(queue: SimpleQueue[Task | None]) -> None:
    while _do_next(queue):  # a call of its own, so that no task is referenced while it waits for the next
        pass
    _finishing.pop(threading.current_thread(), None)


def _do_next(queue: SimpleQueue[Task | None]) -> bool:
    task = queue.get()
    if task is not None:
        task.run()
    return task is not None


@atexit.register
def _finish() -> None:
    finishing = dict(_finishing)
    for queue in finishing.values():
        queue.put(None)
    until = time.monotonic() + EXIT_SECONDS
    for thread in finishing:
        thread.join(max(until - time.monotonic(), 0.0))


Alert = dict[str, Any]
_Functions = tuple[Callable[[Alert], object], ...]

QUEUE_ALERTS = 100
"""Most alerts that wait for a slow function. Beyond them, the newest are dropped and counted."""


class UserCallbacks:
    """Calls the user's functions at alerts. `add` on any thread, `put` on the sender's. Once the optimizer is gone, its
    thread hands over the alerts that wait, and ends."""

    def __init__(self) -> None:
        self.dropped = 0
        self.functions: _Functions = ()
        """The user's functions, in the order in which they were added."""
        self._worker = Worker("sentinel-alerts")

    def add(self, function: Callable[[Alert], object]) -> None:
        """Call `function` at each alert from now on."""
        self.functions = (*self.functions, function)
        self._worker.start()

    def put(self, alert: Alert) -> None:
        """Queue the alert for the functions; returns immediately."""
        if not self.functions:
            return
        if self._worker.waiting < QUEUE_ALERTS:
            self._worker.submit(functools.partial(_call_functions, alert, self.functions))
            return
        self.dropped += 1
        if self.dropped == 1:
            faults.say("on_alert: a function is slower than the alerts come; some are not handed to it")


def _call_functions(alert: Alert, functions: _Functions) -> None:
    for function in functions:
        try:
            function(alert)
        except Exception:
            faults.log.warning("sentinel: %r raised", function, exc_info=True)
