"""Starts a program that is nobody's child: `python -P -S detach.py WORDS PROGRAM ARGUMENTS...`, for daemon_launcher.py.

A training loop that waits for all its children, or a harness that counts them, must not meet the daemon. So this
process forks and ends at once, and is reaped. What it forked starts the program and is its parent for as long as
somebody listens at the other end of the descriptor WORDS: if the program ends meanwhile, its exit status is written
there. Then it ends, too.

A process that has lost its parent goes to init: to the nearest subreaper, or to process 1 of the container. A fresh
interpreter forks here, with one thread and no CUDA.
"""

from __future__ import annotations

import os
import select
import signal
import sys

LOOK_MILLISECONDS = 50
HELD_BACK = frozenset({signal.SIGHUP, signal.SIGTERM, signal.SIGINT})
"""From the program's first instruction on, until it can serve them: it lets them through itself."""


def main(words: int, program: list[str]) -> None:
    """Start the program as nobody's child, and report on `words` how it ended. Raises OSError where it cannot be
    started."""
    os.set_inheritable(words, False)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # ignored, it would be so in the program, too, and the status lost
    signal.pthread_sigmask(signal.SIG_BLOCK, HELD_BACK)
    if os.fork():
        os._exit(0)
    child = os.posix_spawn(program[0], program, os.environ)
    listener = select.poll()
    listener.register(words, 0)  # errors are always told: nobody listens any more
    while not listener.poll(LOOK_MILLISECONDS):
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            try:
                os.write(words, str(os.waitstatus_to_exitcode(status)).encode())
            except BrokenPipeError:
                pass
            return


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
