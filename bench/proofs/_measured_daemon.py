"""Runs a daemon that records how long its event loop is busy with one callback.

    python -m bench.proofs._measured_daemon FILE daemon ...

Each line of FILE is (when the callback began, by the monotonic clock; milliseconds of CPU in the loop's thread). Other
work of a busy machine is not counted, and callbacks under `LEAST_MS` are left out.
"""

from __future__ import annotations

import asyncio
import runpy
import sys
import time
from pathlib import Path
from typing import Any

LEAST_MS = 10.0


def measure(path: Path) -> None:
    """Record the callbacks of all event loops of this process from now on."""
    run = asyncio.Handle._run  # type: ignore[attr-defined]

    def measured(handle: Any) -> None:
        at, began = time.monotonic(), time.thread_time()
        run(handle)
        milliseconds = 1e3 * (time.thread_time() - began)
        if milliseconds >= LEAST_MS:
            with path.open("a") as lines:
                lines.write(f"{at:.3f} {milliseconds:.1f}\n")

    asyncio.Handle._run = measured  # type: ignore[attr-defined]


if __name__ == "__main__":
    measure(Path(sys.argv[1]))
    sys.argv[:] = ["sentinel", *sys.argv[2:]]
    runpy.run_module("sentinel", run_name="__main__")
