"""Runs a script with mounts of its own, as root of a user namespace, which needs no privileges (as `unshare` does).

python contained.py COMMANDS SCRIPT ...    COMMANDS: shell commands that make the mounts
"""

from __future__ import annotations

import ctypes
import os
import runpy
import subprocess
import sys
from pathlib import Path

CLONE_NEWNS, CLONE_NEWUSER = 0x00020000, 0x10000000


def contain(commands: str) -> None:
    """Make mounts that no other process sees."""
    user, group = os.geteuid(), os.getegid()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNS | CLONE_NEWUSER):
        raise OSError(ctypes.get_errno(), "unshare")
    own = Path("/proc/self")
    own.joinpath("setgroups").write_text("deny")
    own.joinpath("uid_map").write_text(f"0 {user} 1")
    own.joinpath("gid_map").write_text(f"0 {group} 1")
    subprocess.run(["sh", "-ec", f"mount --make-rprivate /; {commands}"], check=True)


if __name__ == "__main__":
    contain(sys.argv[1])
    sys.argv = sys.argv[2:]
    runpy.run_path(sys.argv[0], run_name="__main__")
