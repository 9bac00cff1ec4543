"""Runs a script that uses DeepSpeed without the extension that DeepSpeed would compile at first use, in a minute.

python uncompiled.py SCRIPT
"""

from __future__ import annotations

import importlib
import runpy
import sys


def spare() -> None:
    """Make DeepSpeed do without the extension, which is for collectives on the CPU: gloo has its own."""
    importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None  # type: ignore[attr-defined]


if __name__ == "__main__":
    spare()
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
