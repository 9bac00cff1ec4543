"""Threads of ours: there before they are needed, one task after another; and a line about a wait without end.

`Thread.start()` waits without a bound for the first line of the new thread. Where Python finds no memory for that line
(`ulimit -v`), it never comes, and the training loop would stand still. So threads are started before the loop, by
`start_thread`, which waits for `START_SECONDS` at most.
"""

from __future__ import annotations

import _thread
import atexit
import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from queue import SimpleQueue

from sentinel.hooks.core import fault_guard

EXIT_SECONDS = 60.0
"""For which the process waits for its threads at its end: one may hang, on a file system that does not answer, say."""
START_SECONDS = 5.0
"""How long a new thread may take to begin. It takes 0.1 ms where there is memory for it."""
LATE_SECONDS = 30.0
"""After which a line says what the training thread waits for, as it does for a file server that hangs."""
_LOOK_SECONDS = 1.0
"""Between two looks whether the thread that a task waits for is still there."""

_finishing: dict[threading.Thread, SimpleQueue[Task | None]] = {}
"""Threads that the end of the process waits for."""


def start_thread(thread: threading.Thread) -> None:
    """Start it, or raise RuntimeError after `START_SECONDS` at most."""
    began = threading.Event()
    refused: list[Exception] = []

    def start() -> None:
        try:
            thread.start()
        except Exception as error:
            refused.append(error)
        began.set()

    _thread.start_new_thread(start, ())  # it waits for the first line, and without end where that does not come
    if not began.wait(START_SECONDS):
        raise RuntimeError(f"{thread.name}: the thread did not begin within {START_SECONDS:g} s")
    if refused:
        raise refused[0]


@contextlib.contextmanager
def say_if_late(doing: str, *, speaks: bool) -> Iterator[None]:
    """Say what the block is doing where it is not over after `LATE_SECONDS`. It goes on all the same: no call to the
    system can be given up. `speaks`: for other ranks, too, that do the same beside this one."""
    timer: threading.Timer | None = None
    if speaks:
        with contextlib.suppress(RuntimeError, MemoryError):  # without the line, but the block is done
            late = (
                f"{doing} has taken {LATE_SECONDS:g} s so far and goes on; if it does not end, check that file system"
            )
            timer = threading.Timer(LATE_SECONDS, fault_guard.say, (late,))
            timer.daemon = True
            start_thread(timer)
    try:
        yield
    finally:
        if timer is not None:
            timer.cancel()


class Task:
    """Something that a worker does."""

    def __init__(self, run: Callable[[], object], thread: threading.Thread) -> None:
        self._run: Callable[[], object] | None = run
        self._thread = thread
        self._done = threading.Event()

    def run(self) -> None:
        """On the worker's thread. What it holds is let go of before anyone who waits goes on."""
        run, self._run = self._run, None
        try:
            if run is not None:
                run()
        except BaseException:
            fault_guard.swallow(self._thread.name, "without it")
        finally:
            del run
            self._done.set()

    @property
    def over(self) -> bool:
        """Whether it is done, or will never be: its thread has ended, or is not in this process since a fork."""
        return self._done.is_set() or not self._thread.is_alive()

    def wait(self, seconds: float = float("inf")) -> bool:
        """Until it is over, for so many seconds at most; whether it is done."""
        until = time.monotonic() + seconds
        while not self.over and (left := until - time.monotonic()) > 0:
            self._done.wait(min(left, _LOOK_SECONDS))
        return self._done.is_set()


class Worker:
    """One thread. It sleeps while there is nothing to do, and ends with its worker."""

    def __init__(self, name: str, *, finishes: bool = False) -> None:
        """`finishes`: process exit waits for its tasks, for `EXIT_SECONDS` at most. A task inside torch would abort the
        process when it returned to an interpreter that is gone; other tasks are dropped."""
        self._name, self._finishes = name, finishes
        self._queue = SimpleQueue[Task | None]()
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()

    @property
    def waiting(self) -> int:
        """Number of tasks that it has not begun."""
        return self._queue.qsize()

    def start(self) -> None:
        """Make the thread ahead of its first task. Where that fails, `submit` tries again."""
        with contextlib.suppress(RuntimeError, MemoryError):
            self._ensure_thread()

    def submit(self, run: Callable[[], object]) -> Task:
        """Have it done after what was submitted before. RuntimeError: there is no thread, and none can be started."""
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
        queue = SimpleQueue[Task | None]()  # one of its own: a thread that begins too late finds its end there
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
        """The thread ends once it has done what was submitted."""
        self._queue.put(None)

    def __del__(self) -> None:
        self.close()


def _serve(queue: SimpleQueue[Task | None]) -> None:
    while _do_next(queue):  # a call, so that no task is held while it waits for the next
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
