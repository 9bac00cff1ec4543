"""The supervisor of `sentinel run`: watches a training command, ends it where it cannot go on, and restarts it.

    Supervisor    acts on signals, the command's end and the daemon's messages
    Words         the connection to the daemon, which reports on the job once it was asked
    Job           the command and all its descendant processes
    Policy        decides whether the job is started again: pure
    Telling       what the supervisor prints on stderr

The daemon judges and collects the evidence; this process acts: it is the parent of the job, and outlives it.
"""

from __future__ import annotations

from sentinel.supervise.supervisor import Supervisor

__all__ = ["Supervisor"]
