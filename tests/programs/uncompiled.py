"""Runs a script that uses DeepSpeed without the extension that it compiles at the first use, for a minute.

python uncompiled.py SCRIPT
"""

from __future__ import annotations

import importlib
import runpy
import sys


def spare() -> None:
    """Have DeepSpeed do without it: it is for the CPU's own collectives, and gloo has its own."""
    importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None  # type: ignore[attr-defined]


if __name__ == "__main__":
    spare()
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
