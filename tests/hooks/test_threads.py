"""Threads that are started before they are needed, and thread starts that cannot hang."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading

import pytest

from sentinel.hooks.core import threads
from sentinel.hooks.core.threads import Worker, start_thread

WAIT = 60.0


def test_jobs_are_done_in_order_by_one_thread() -> None:
    done: list[tuple[int, int]] = []
    one = Worker("one")
    jobs = [one.submit(lambda n=n: done.append((n, threading.get_ident()))) for n in range(3)]
    assert all(job.wait(WAIT) for job in jobs)
    assert [n for n, _ in done] == [0, 1, 2]
    assert len({ident for _, ident in done}) == 1


def test_the_thread_ends_with_its_worker() -> None:
    one = Worker("to be gone")
    one.start()
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "to be gone"]
    del one
    gc.collect()
    thread.join(WAIT)
    assert not thread.is_alive()


@pytest.mark.faults
def test_a_job_that_raises_is_over_and_the_next_is_done(swallowed: list[str]) -> None:
    def leave() -> None:
        raise SystemExit

    one = Worker("raises")
    assert one.submit(leave).wait(WAIT)
    assert one.submit(lambda: None).wait(WAIT)
    assert len(swallowed) == 1


def test_a_job_is_waited_for_no_longer_than_wanted() -> None:
    go = threading.Event()
    one = Worker("slow")
    job = one.submit(lambda: go.wait(WAIT))
    assert not job.wait(0.01)
    assert not job.over
    go.set()
    assert job.wait(WAIT)


def test_a_thread_that_a_fork_left_behind_is_not_waited_for() -> None:
    go = threading.Event()
    one = Worker("parent's")
    job = one.submit(lambda: go.wait(WAIT))
    child = os.fork()
    if not child:
        os._exit(0 if not job.wait() and one.submit(lambda: None).wait(WAIT) else 1)
    _, status = os.waitpid(child, 0)
    go.set()
    assert os.waitstatus_to_exitcode(status) == 0
    assert job.wait(WAIT)


def test_a_thread_that_never_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "START_SECONDS", 0.05)
    begun = threading.Event()
    late = threading.Thread(name="late")
    monkeypatch.setattr(late, "start", lambda: begun.wait(WAIT))
    with pytest.raises(RuntimeError, match=r"late: the thread did not begin within 0\.05 s"):
        start_thread(late)
    begun.set()


def test_a_thread_that_the_system_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = RuntimeError("can't start new thread")

    def start() -> None:
        raise refused

    thread = threading.Thread()
    monkeypatch.setattr(thread, "start", start)
    with pytest.raises(RuntimeError) as raised:
        start_thread(thread)
    assert raised.value is refused


PRELUDE = """
import resource, sys, threading
from pathlib import Path
from sentinel.hooks.core import threads
from sentinel.hooks.core.threads import Worker, start_thread

def limit():
    "Nothing is left, but what Python and the C library have asked for already: a used stack, for one."
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used, resource.RLIM_INFINITY))

def lift():
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
"""
STARTED = """
for _ in range(2):
    used = [threading.Thread(target=bool) for _ in range(2)]
    for thread in used: thread.start()
    for thread in used: thread.join()
threads.START_SECONDS = 2.0
limit()
try:
    start_thread(threading.Thread(target=bool, daemon=True))
except RuntimeError as error:
    lift()
    print(error)
"""
TRAINED = """
import torch
import sentinel
from sentinel.hooks.session import registry

torch.set_num_threads(1)
net = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
sentinel.attach(net, optimizer, rollback=sentinel.Rollback(every=2, keep=2, margin=1))

def train(steps):
    for _ in range(steps):
        optimizer.zero_grad()
        net(torch.ones(2, 4)).sum().backward()
        optimizer.step()

train(20)
limit()
train(20)
lift()
train(20)
print(registry.sessions[0].restorer.held)
"""


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.processes
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    ("script", "last"),
    [(STARTED, "thread"), (TRAINED, "(56, 58)")],
    ids=["a start", "snapshots"],
)
def test_no_memory_for_a_new_thread(script: str, last: str) -> None:
    """Under `ulimit -v` Python may fail to run a thread's first line, for which Thread.start() waits without end."""
    done = subprocess.run([sys.executable, "-c", PRELUDE + script], capture_output=True, text=True, timeout=WAIT)
    assert done.returncode == 0, done.stderr
    assert last in done.stdout
