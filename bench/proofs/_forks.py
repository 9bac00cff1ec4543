"""Forks ranks from one process that has loaded torch: loading it takes most of a short job's time."""

from __future__ import annotations

import os
import signal
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any


def fork(task: Callable[[], object]) -> int:
    """Fork a process that runs the task and exits, with 0 or after an error with 1; return its pid."""
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
    """Kill a process, and wait for its end."""
    try:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
    except (ProcessLookupError, ChildProcessError):
        pass


def silence() -> None:
    """Discard this process's standard error."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


def join_store(folder: Path, *, host: bool) -> Any:
    """Return a TCPStore between processes; the one with `host` hosts it, and writes its port into `folder`."""
    import torch.distributed as dist

    if host:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        leave(folder / "port", str(store.port))
        return store
    while not (folder / "port").exists():
        time.sleep(0.005)
    return dist.TCPStore("127.0.0.1", int((folder / "port").read_text()), is_master=False)


def leave(path: Path, text: str) -> None:
    """Write a file atomically: it is there whole or not at all."""
    draft = path.with_name(path.name + ".tmp")
    draft.write_text(text)
    draft.rename(path)
