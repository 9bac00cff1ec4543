"""Who this rank is: the run's name and id, the attempt, the rank. All ranks of a job must come to the same.

    id     SENTINEL_RUN_ID, else the scheduler's job (SLURM_JOB_ID), else torchrun's (TORCHELASTIC_RUN_ID, unless
           "none"), else what rank 0 leaves in the process group's store, else a fresh one
    name   attach(run=), SENTINEL_RUN, else the script's

The store is asked without waiting, from the sender's thread: no collective, nothing that a rank could hang in.
"""

from __future__ import annotations

import copy
import os
import re
import secrets
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from sentinel import wire
from sentinel.node import paths

STORE_SECONDS = 30.0
"""How long the other ranks wait for rank 0's word, and all of them for a process group."""
_ID_LIMIT = 40
_FRESH = 4
"""Random bytes in a fresh id: enough that two runs of one name on one node do not meet."""


class RunIdentity:
    """Identity of this `attach`; the run's id may become known only later."""

    def __init__(self, run: str | None, ordinal: int) -> None:
        """`ordinal`: how many attaches this process has made before; each is a run of its own."""
        environment = os.environ
        self.name = printable(run or environment.get("SENTINEL_RUN") or script_name())
        self.session = secrets.token_hex(6)
        self._ordinal = ordinal
        self._deadline = time.monotonic() + STORE_SECONDS
        self._run_id = _from_environment(environment, self.name, ordinal)
        self._fresh = plain(self.name, _ID_LIMIT - 2 * _FRESH - 1) + "-" + secrets.token_hex(_FRESH)

    def again(self) -> RunIdentity:
        """The same run, attached to once more."""
        again = copy.copy(self)
        again.session = secrets.token_hex(6)
        return again

    def resolve(self) -> wire.Identity | None:
        """The identity, or None as long as the run's id is to be found out. Asked again every now and then."""
        rank, world_size = place()
        if self._run_id is None:
            self._run_id = self._fresh if world_size == 1 else self._agree_on_id(rank)
        if self._run_id is None:
            return None
        return wire.Identity(
            run=self.name,
            run_id=self._run_id,
            attempt=attempt(os.environ),
            rank=rank,
            world_size=world_size,
            local_rank=local_rank(),
            local_world_size=_number(os.environ, "LOCAL_WORLD_SIZE"),
            node=find_node(rank),
            members=members(),
            hostname=socket.gethostname(),
            pid=os.getpid(),
            session=self.session,
        )

    def find_directory(self) -> Path | None:
        """The run's runtime directory; None as long as its id is to be found out."""
        identity = self.resolve()
        return paths.run_directory(identity.run_id) if identity is not None else None

    def _agree_on_id(self, rank: int) -> str | None:
        key = f"sentinel/run/{self._ordinal}"
        try:
            store = group_store()
            if store is not None and rank == 0:
                # compare_set: with torchrun the store may outlive a restart, and the run with it.
                return bytes(store.compare_set(key, "", self._fresh)).decode()
            if store is not None and store.check([key]):
                return bytes(store.get(key)).decode()
        except RuntimeError:  # the store is gone, or not there yet
            pass
        return None if time.monotonic() < self._deadline else self._fresh


def in_notebook() -> bool:
    """Whether this process is a notebook's kernel. A process that starts kernels imports parts of ipykernel, too."""
    app = getattr(sys.modules.get("ipykernel.kernelapp"), "IPKernelApp", None)
    return app is not None and bool(app.initialized())


def script_name() -> str:
    """Stem of the script that runs, name of the package that does; `notebook`, or `python` for code that is no file of
    its own: of `-c`, of standard input, of a pipe, typed in."""
    if in_notebook():
        return "notebook"
    name = getattr(sys.modules.get("__main__"), "__file__", None) or sys.argv[0]
    path = Path(name)
    if name == "-c" or name.startswith(("<", "/dev/", "/proc/")):
        return "python"
    stem = path.parent.name if path.stem == "__main__" else path.stem
    return stem if stem not in ("", "-") else "python"


def place() -> tuple[int, int]:
    """(rank, world size): of the default process group, else of the launcher's environment."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    if "RANK" in os.environ:
        return _number(os.environ, "RANK"), max(_number(os.environ, "WORLD_SIZE"), 1)
    return 0, 1


def find_node(rank: int) -> int:
    """Number of the node that this `rank` is on, by `sentinel run`, by torchrun, by Slurm, else as if each had as many
    ranks. That of `sentinel run` stays where the job goes on without some nodes."""
    for name in ("SENTINEL_NODE", "GROUP_RANK", "SLURM_NODEID"):
        if name in os.environ:
            return _number(os.environ, name)
    return rank // neighbours() if "LOCAL_WORLD_SIZE" in os.environ else 0


def members() -> wire.Members:
    """The nodes of this attempt, where `sentinel run` may leave some out."""
    try:
        return msgspec.json.decode(os.environ.get("SENTINEL_MEMBERS", "{}"), type=wire.Members)
    except msgspec.DecodeError:  # not of our `sentinel run`
        return wire.Members()


def neighbours() -> int:
    """Ranks on this node, this one with them, as far as the launcher says."""
    return max(_number(os.environ, "LOCAL_WORLD_SIZE"), 1)


def spans_nodes() -> bool:
    """Whether other ranks of the job are on other nodes, as far as the launcher says."""
    return "LOCAL_WORLD_SIZE" in os.environ and place()[1] > neighbours()


def leads_node() -> bool:
    """Whether this is the first rank of its node, as far as the launcher says."""
    return local_rank() == 0


def local_rank() -> int:
    """Number of this rank on its node, as far as the launcher says."""
    return _number(os.environ, "LOCAL_RANK")


def attempt(environment: Mapping[str, str]) -> int:
    """Restart count. A requeue by Slurm counts thousands: torchrun's own count begins at 0 again in it, and in a job
    that `sentinel run` starts again, which says what number comes after the last attempt's."""
    first = _number(environment, "SENTINEL_ATTEMPT") or 1000 * _number(environment, "SLURM_RESTART_COUNT")
    return first + _number(environment, "TORCHELASTIC_RESTART_COUNT")


def plain(text: str, limit: int = _ID_LIMIT) -> str:
    """Only what an id may have: letters, digits, `-`, `_`."""
    return re.sub(r"[^A-Za-z0-9_-]+", "-", text).strip("-")[:limit] or "run"


def printable(text: str) -> str:
    """Without what UTF-8 cannot hold: names of files and variables may have any bytes in them."""
    return text.encode(errors="replace").decode()


def _from_environment(environment: Mapping[str, str], name: str, ordinal: int) -> str | None:
    suffix = f"-{ordinal + 1}" if ordinal else ""
    if named := environment.get("SENTINEL_RUN_ID"):
        return plain(named, _ID_LIMIT - len(suffix)) + suffix
    if job := environment.get("SLURM_JOB_ID"):
        return plain(f"slurm-{_slurm_job(environment, job)}{suffix}-{name}")
    elastic = environment.get("TORCHELASTIC_RUN_ID", "none")
    if elastic != "none":
        return plain(f"{elastic}{suffix}-{name}")
    return None


def _slurm_job(environment: Mapping[str, str], job: str) -> str:
    array_job, task = environment.get("SLURM_ARRAY_JOB_ID"), environment.get("SLURM_ARRAY_TASK_ID")
    parts = [f"{array_job}_{task}" if array_job and task else job]
    if step := environment.get("SLURM_STEP_ID"):
        parts.append(step)
    if "RANK" not in environment and place()[1] == 1 and _number(environment, "SLURM_NTASKS") > 1:
        parts.append(environment.get("SLURM_PROCID", "0"))  # a sweep: as many runs as tasks
    return "-".join(parts)


def _number(environment: Mapping[str, str], name: str) -> int:
    try:
        return int(environment.get(name, "0"))
    except ValueError:
        return 0


def group_store() -> Any:
    """The default process group's store; None as long as there is none."""
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        return None
    return dist.distributed_c10d._get_default_store()
