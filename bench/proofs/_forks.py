"""Ranks that are forks of one process which has loaded torch: most of the time that a short job takes."""

from __future__ import annotations

import os
import signal
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any


def fork(task: Callable[[], object]) -> int:
    """A process that does it, and ends."""
    if child := os.fork():
        return child
    try:
        task()
        os._exit(0)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def end(process: int) -> None:
    """Kill it, and wait for it."""
    try:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
    except (ProcessLookupError, ChildProcessError):
        pass


def silence() -> None:
    """Nothing that this process says is of interest."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


def join_store(folder: Path, *, host: bool) -> Any:
    """A store between processes, which one of them hosts."""
    import torch.distributed as dist

    if host:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        leave(folder / "port", str(store.port))
        return store
    while not (folder / "port").exists():
        time.sleep(0.005)
    return dist.TCPStore("127.0.0.1", int((folder / "port").read_text()), is_master=False)


def leave(path: Path, text: str) -> None:
    """Write a file that is there whole or not at all."""
    draft = path.with_name(path.name + ".tmp")
    draft.write_text(text)
    draft.rename(path)
