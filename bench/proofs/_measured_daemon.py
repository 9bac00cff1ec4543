"""A daemon that writes down how long its loop did one thing: `python -m bench.proofs._measured_daemon FILE daemon ...`.

Each line is (when it began, by the monotonic clock; milliseconds of CPU in the loop's thread). What else a busy machine
does is not counted, and what took less than `LEAST_MS` is left out.
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
    """From now on, in this process."""
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
