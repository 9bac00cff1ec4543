"""When the death of a process is reported."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import time

import pytest

from sentinel.daemon.ranks.processes import MESSAGE_SECONDS, Processes


@pytest.mark.parametrize("stalls", [False, True])
def test_what_was_sent_before_a_process_ended_is_read_first(stalls: bool) -> None:
    """A busy daemon saw the end of a rank before its supervisor's message, and reported the rank as lost. `stalls`: the
    loop stands still once more after it has seen the end, for longer than the report waits."""
    happened: list[str] = []
    child = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read(); sys.exit(3)"], stdin=-1)

    def end_child() -> None:
        assert child.stdin is not None
        child.stdin.close()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)

    def stand_still() -> None:
        time.sleep(2 * MESSAGE_SECONDS)

    async def watch() -> None:
        loop, over = asyncio.get_running_loop(), asyncio.Event()
        supervisor, ours = socket.socketpair()
        ours.setblocking(False)

        def report(pid: int, status: int | None) -> None:
            happened.append(f"ended with {status}")
            over.set()

        async def read() -> None:  # in the way the daemon's connections are read
            await loop.sock_recv(ours, 1)
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            happened.append("announced")

        processes = Processes(report)
        processes.take(child.pid, os.pidfd_open(child.pid))
        reading = asyncio.create_task(read())
        await asyncio.sleep(0)
        if stalls:
            end_child()
            await asyncio.sleep(MESSAGE_SECONDS / 10)  # the end is seen
            supervisor.send(b"x")
            stand_still()
        else:
            supervisor.send(b"x")
            end_child()  # the loop does not run meanwhile, and finds both at once
        await asyncio.wait_for(over.wait(), 60)
        await reading
        processes.close()
        supervisor.close()
        ours.close()

    asyncio.run(watch())
    child.wait()
    assert happened == ["announced", "ended with 3"]
