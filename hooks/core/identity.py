"""Finds this rank's identity: the run's name and id, the attempt, the rank. All ranks of a job find the same run.

    id     SENTINEL_RUN_ID, else the scheduler's job (SLURM_JOB_ID), else torchrun's (TORCHELASTIC_RUN_ID, unless
           "none"), else what rank 0 leaves in the process group's store, else a fresh one
    name   attach(run=), else SENTINEL_RUN, else the script's name

The store is read without waiting, on the sender's thread: no collective, nothing that a rank could hang in.
"""

from __future__ import annotations

import copy
import os
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
from sentinel.node.run_ids import LIMIT, shorten_id, spell_id

STORE_SECONDS = 30.0
"""How long the other ranks wait for rank 0's id, and all ranks for a process group."""
_FRESH = 4
"""Random bytes in a fresh id: enough that two runs of one name on one node do not get the same."""


class RunIdentity:
    """Identity of one `attach`; the run's id may become known only later."""

    def __init__(self, run: str | None, ordinal: int) -> None:
        """`ordinal`: how many times this process has attached before; each `attach` is a run of its own."""
        environment = os.environ
        self.name = printable(run or environment.get("SENTINEL_RUN") or script_name())
        self.session = secrets.token_hex(6)
        self._ordinal = ordinal
        self._deadline = time.monotonic() + STORE_SECONDS
        self._run_id = _from_environment(environment, self.name, ordinal)
        self._fresh = spell_id(self.name, LIMIT - 2 * _FRESH - 1) + "-" + secrets.token_hex(_FRESH)

    def again(self) -> RunIdentity:
        """Return the identity of the same run for another `attach` to it."""
        again = copy.copy(self)
        again.session = secrets.token_hex(6)
        return again

    def resolve(self) -> wire.Identity | None:
        """Return the identity, or None while the run's id is not known yet. The caller asks again now and then."""
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
        """Return the run's runtime directory; None while the run's id is not known yet."""
        identity = self.resolve()
        return paths.run_directory(identity.run_id) if identity is not None else None

    def _agree_on_id(self, rank: int) -> str | None:
        key = f"sentinel/run/{self._ordinal}"
        try:
            store = group_store()
            if store is not None and rank == 0:
                # compare_set, as the store may outlive a restart under torchrun, and then the run is the same.
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
    """Return the stem of the script that runs, or the name of the package; `notebook` in a notebook, and `python`
    for code without a file of its own: `-c`, standard input, a pipe, or typed in."""
    if in_notebook():
        return "notebook"
    name = getattr(sys.modules.get("__main__"), "__file__", None) or sys.argv[0]
    path = Path(name)
    if name == "-c" or name.startswith(("<", "/dev/", "/proc/")):
        return "python"
    stem = path.parent.name if path.stem == "__main__" else path.stem
    return stem if stem not in ("", "-") else "python"


def place() -> tuple[int, int]:
    """Return (rank, world size), from the default process group, else from the launcher's environment."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    if "RANK" in os.environ:
        return _number(os.environ, "RANK"), max(_number(os.environ, "WORLD_SIZE"), 1)
    return 0, 1


def find_node(rank: int) -> int:
    """Return the number of the node that `rank` is on: from `sentinel run`, torchrun or Slurm, else as if all nodes had
    as many ranks as this one. That of `sentinel run` stays the same where the job goes on without some nodes."""
    for name in ("SENTINEL_NODE", "GROUP_RANK", "SLURM_NODEID"):
        if name in os.environ:
            return _number(os.environ, name)
    return rank // neighbours() if "LOCAL_WORLD_SIZE" in os.environ else 0


def members() -> wire.Members:
    """Return the nodes of this attempt, where `sentinel run` may leave some out."""
    try:
        return msgspec.json.decode(os.environ.get("SENTINEL_MEMBERS", "{}"), type=wire.Members)
    except msgspec.DecodeError:  # the variable is not from our `sentinel run`
        return wire.Members()


def neighbours() -> int:
    """Return the number of ranks on this node, this one included, as far as the launcher says."""
    return max(_number(os.environ, "LOCAL_WORLD_SIZE"), 1)


def spans_nodes() -> bool:
    """Whether other ranks of the job are on other nodes, as far as the launcher says."""
    return "LOCAL_WORLD_SIZE" in os.environ and place()[1] > neighbours()


def leads_node() -> bool:
    """Whether this is the first rank of its node, as far as the launcher says."""
    return local_rank() == 0


def local_rank() -> int:
    """Return the number of this rank on its node, as far as the launcher says."""
    return _number(os.environ, "LOCAL_RANK")


def attempt(environment: Mapping[str, str]) -> int:
    """Return how many attempts came before this one. A requeue by Slurm adds 1000: torchrun's own count begins at 0
    again in it, as it does in a job that `sentinel run` restarts, which sets SENTINEL_ATTEMPT to the number that comes
    after the last attempt's."""
    first = _number(environment, "SENTINEL_ATTEMPT") or 1000 * _number(environment, "SLURM_RESTART_COUNT")
    return first + _number(environment, "TORCHELASTIC_RESTART_COUNT")


def printable(text: str) -> str:
    """Return `text` without what UTF-8 cannot encode: names of files and variables may contain any bytes."""
    return text.encode(errors="replace").decode()


def _from_environment(environment: Mapping[str, str], name: str, ordinal: int) -> str | None:
    suffix = f"-{ordinal + 1}" if ordinal else ""
    if named := environment.get("SENTINEL_RUN_ID"):
        return shorten_id(named, LIMIT - len(suffix)) + suffix
    if job := environment.get("SLURM_JOB_ID"):
        return shorten_id(f"slurm-{_slurm_job(environment, job)}{suffix}-{name}")
    elastic = environment.get("TORCHELASTIC_RUN_ID", "none")
    if elastic != "none":
        return shorten_id(f"{elastic}{suffix}-{name}")
    return None


def _slurm_job(environment: Mapping[str, str], job: str) -> str:
    array_job, task = environment.get("SLURM_ARRAY_JOB_ID"), environment.get("SLURM_ARRAY_TASK_ID")
    parts = [f"{array_job}_{task}" if array_job and task else job]
    if step := environment.get("SLURM_STEP_ID"):
        parts.append(step)
    if "RANK" not in environment and place()[1] == 1 and _number(environment, "SLURM_NTASKS") > 1:
        parts.append(environment.get("SLURM_PROCID", "0"))  # a sweep: each task is a run of its own
    return "-".join(parts)


def _number(environment: Mapping[str, str], name: str) -> int:
    try:
        return int(environment.get(name, "0"))
    except ValueError:
        return 0


def group_store() -> Any:
    """Return the default process group's store; None while there is none."""
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        return None
    return dist.distributed_c10d._get_default_store()
