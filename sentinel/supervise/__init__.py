"""`sentinel run`: stays beside a training command, ends it where it cannot go on, and starts it again.

    Supervisor    signals, the command's end, the daemon's word -> what is done
    Words         what the daemon says of the job, which it is asked for once
    Job           the command and all its descendant processes
    Policy        start it again, or not: pure
    Telling       what it says on stderr

The daemon judges and collects the evidence; this process has hands: it is the parent of the job, and outlives it.
"""

from __future__ import annotations

from sentinel.supervise.supervisor import Supervisor

__all__ = ["Supervisor"]
