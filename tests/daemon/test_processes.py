"""When the death of a process is reported."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys

from sentinel.daemon.ranks.processes import Processes


def test_what_was_sent_before_a_process_ended_is_read_first() -> None:
    """A busy daemon saw the end of a rank before its supervisor's message, and reported the rank as lost."""
    happened: list[str] = []
    child = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read(); sys.exit(3)"], stdin=-1)

    def end_child() -> None:
        assert child.stdin is not None
        child.stdin.close()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)

    async def watch() -> None:
        loop, over = asyncio.get_running_loop(), asyncio.Event()
        supervisor, ours = socket.socketpair()
        ours.setblocking(False)

        def report(pid: int, status: int | None) -> None:
            happened.append(f"ended with {status}")
            over.set()

        async def read() -> None:  # in the way the daemon's connections are read
            await loop.sock_recv(ours, 1)
            happened.append("announced")

        processes = Processes(report)
        processes.take(child.pid, os.pidfd_open(child.pid))
        reading = asyncio.create_task(read())
        await asyncio.sleep(0)
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
