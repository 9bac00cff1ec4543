"""Starts a program that is not a child of the caller: `python -P -S detach.py STATUS PROGRAM ARGUMENTS...`.

A training loop that waits for all its children, or a test harness that counts them, must not see the daemon. So this
process forks, exits, and is reaped. Its fork starts the program and stays its parent while the other end of the
descriptor STATUS is open: if the program ends meanwhile, its exit status is written there. Then the fork ends, too.

A process that has lost its parent becomes a child of init: of the nearest subreaper, or of process 1 of the container.
It is a fresh interpreter that forks here, with one thread and without CUDA.
"""

from __future__ import annotations

import os
import select
import signal
import sys

LOOK_MILLISECONDS = 50
HELD_BACK = frozenset({signal.SIGHUP, signal.SIGTERM, signal.SIGINT})
"""Signals blocked from the program's first instruction until it can handle them: it unblocks them itself."""


def main(status_descriptor: int, program: list[str]) -> None:
    """Start the program and report on `status_descriptor` how it ended. Raises OSError if it cannot be started."""
    os.set_inheritable(status_descriptor, False)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # if ignored, the program inherits that and the status is lost
    signal.pthread_sigmask(signal.SIG_BLOCK, HELD_BACK)
    if os.fork():
        os._exit(0)
    child = os.posix_spawn(program[0], program, os.environ)
    listener = select.poll()
    listener.register(status_descriptor, 0)  # poll always reports errors, such as that the other end is closed
    while not listener.poll(LOOK_MILLISECONDS):
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            try:
                os.write(status_descriptor, str(os.waitstatus_to_exitcode(status)).encode())
            except BrokenPipeError:
                pass
            return


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
