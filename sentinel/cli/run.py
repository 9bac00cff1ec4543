"""`sentinel run`: run a training command under watch, without code changes."""

from __future__ import annotations

import itertools
import os
import re
import secrets
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

import click

import sentinel
from sentinel.cli.finite import Finite
from sentinel.cli.options import json_option
from sentinel.cli.plain import echo, plain
from sentinel.node.run_ids import spell_id
from sentinel.supervise.job_nodes import find_job_nodes
from sentinel.supervise.policy import PAUSE_SECONDS, RESTARTS

_BLIND = frozenset({"-I", "-E", "-S"})
"""Options with which Python ignores PYTHONPATH, or imports no sitecustomize."""
_NAMED = 30
"""Most characters of the name in a run's id."""
_ONE_NODE = ("1", "1:1")
"""Numbers of nodes, as torchrun takes them, of a job on one node."""


@click.command(
    context_settings={
        "ignore_unknown_options": True,
        "allow_interspersed_args": False,  # all options after the command's name are its own, with or without `--`
    },
)
@click.option("--name", help="Name of the run. [default: $SENTINEL_RUN, the script's]")
@click.option(
    "--restarts",
    metavar="N",
    type=click.IntRange(min=0),
    help=f"How often the job may be started again. [default: {RESTARTS} where the script resumes, else never]",
)
@click.option(
    "--pause",
    metavar="SECONDS",
    type=Finite(min=0),
    default=PAUSE_SECONDS,
    show_default=True,
    help="Seconds before the first restart; each further one waits twice as long.",
)
@click.option(
    "--allow-shrink",
    metavar="MIN",
    type=click.IntRange(min=1),
    help="Go on without nodes that are lost, with more than half of those before and at least MIN. Node 0 is never "
    "left out, and of two nodes none is. The command needs {nodes} and {node_rank} in it, and this node's number is "
    "$SENTINEL_NODE_RANK of $SENTINEL_NODES.",
)
@json_option("Report on stderr as JSON lines instead of sentences. Linux only.")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED, metavar="-- COMMAND...")
def run(
    name: str | None,
    restarts: int | None,
    pause: float,
    allow_shrink: int | None,
    as_json: bool,
    command: tuple[str, ...],
) -> None:
    """Run a training command under watch, without code changes, and start it again when it fails.

    Sentinel attaches at the first backward pass, in every process of the command that trains: ranks are one run. Where
    there are several optimizers it attaches at the first step of one. An `attach` in the script takes over.
    Processes that do not train are left alone. Nothing is installed: a directory is put in front of PYTHONPATH.

    A script that resumes (sentinel.resume, or `checkpoint` of an integration) is started again after a crash, a kill,
    a hang, or a fault that no rollback could fix: evidence is collected first, then all its processes are ended.
    --restarts does the same for a script that resumes in its own way. docs/run.md has the rest.

    \b
    Exit codes:  the command's own, 126 and 127 as in a shell, and
                 85  no restart is left, or it cannot be started again here:
                     elsewhere, or later, it may go on
                 86  do not requeue: the same fault came back at the same step
                 87  do not requeue: an alert with the action `stop` ended the run
                 88  the job goes on without this node (--allow-shrink)

    \b
    Example:  sentinel run -- python train.py --lr 3e-4
              sentinel run --name gpt -- torchrun --nproc-per-node 2 train.py
              sentinel run --restarts 5 -- torchrun --nproc-per-node 8 train.py
    """
    options = itertools.takewhile(lambda word: word.startswith("-"), command[1:])
    if Path(command[0]).name.startswith("python") and (blind := _BLIND.intersection(options)):
        echo(f"sentinel: with {min(blind)} Python does not see Sentinel: training is unmonitored", err=True)
    given = dict(os.environ)
    nodes = find_job_nodes(allow_shrink, given, command) if allow_shrink is not None else None
    if nodes is not None and nodes.members.whole < 3:
        echo("sentinel: --allow-shrink: of fewer than three nodes none can be left out: more than half go on", err=True)
    if nodes is not None and nodes.members.whole == 1:  # it is started again like any job of one node
        command, given, nodes = tuple(nodes.fill(command)), given | nodes.list_environment(), None
    made = environment(given, command, name)
    if sys.platform != "linux" or "SENTINEL_SUPERVISOR" in os.environ:  # a nested one has nothing to do
        execute(command if nodes is None else nodes.fill(command), made)
    from sentinel.supervise.supervisor import NotStarted, Supervisor, leave

    try:
        status = Supervisor(
            command, made, restarts=RESTARTS if restarts is None else restarts, always=restarts is not None,
            pause=pause, over_nodes=nodes is not None or _spread(given, command), nodes=nodes, as_json=as_json,
        ).run()  # fmt: skip
    except NotStarted as error:
        _exit_unstarted(command[0], error.cause)
    leave(status)


def environment(given: Mapping[str, str], command: Sequence[str], name: str | None) -> dict[str, str]:
    """Return the environment in which the command is watched: all its processes inherit it."""
    hook = str(Path(sentinel.__file__).parent / "launch")
    paths = [path for path in given.get("PYTHONPATH", "").split(os.pathsep) if path and path != hook]
    made = {**given, "PYTHONPATH": os.pathsep.join([hook, *paths])}
    # A store that torchrun's restarts share keeps addresses of dead processes: gloo then hangs (pytorch#135712).
    made.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    if name:
        made["SENTINEL_RUN"] = name
    if not given.get("SENTINEL_RUN_ID") and _alone(given, command):
        made["SENTINEL_RUN_ID"] = (
            f"{spell_id(name or given.get('SENTINEL_RUN') or _script(command), _NAMED)}-{secrets.token_hex(4)}"
        )
    return made


def execute(command: Sequence[str], environment: Mapping[str, str]) -> None:
    """Replace this process with the command. Never returns; raises SystemExit where the command cannot be started."""
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.execvpe(command[0], list(command), dict(environment))
    except (OSError, ValueError) as error:
        _exit_unstarted(command[0], error)


def _exit_unstarted(command: str, error: OSError | ValueError) -> NoReturn:
    """Exit as a shell does where the command cannot be started: 127 not found, 126 not executable. `error`: a
    ValueError for a name with a null byte."""
    if isinstance(error, FileNotFoundError | ValueError):
        echo(f"sentinel: {plain(command)}: no such command", err=True)
        sys.exit(127)
    echo(f"sentinel: {plain(command)}: {error.strerror}", err=True)
    sys.exit(126)


def _alone(given: Mapping[str, str], command: Sequence[str]) -> bool:
    """Whether all ranks are started here. If not, they share the scheduler's id, torchrun's, or rank 0's."""
    return "SLURM_JOB_ID" not in given and "RANK" not in given and _find_nodes(given, command) in _ONE_NODE


def _spread(given: Mapping[str, str], command: Sequence[str]) -> bool:
    """Whether other nodes or tasks have ranks of the job, too: it is then restarted on all at once, or not at all."""
    return _find_nodes(given, command) not in _ONE_NODE or given.get("SLURM_STEP_NUM_TASKS", "1") != "1"


def _find_nodes(given: Mapping[str, str], command: Sequence[str]) -> str:
    """Return the number of nodes as torchrun gets it: by its option, by that or the configuration file of `accelerate
    launch`, or by its variable, which JobSets set."""
    option = re.search(r"--(?:nnodes|num[-_]machines)[= ](\S+)", " ".join(command))
    if option is not None:
        return option[1]
    return _read_accelerate_nodes(given, command) or given.get("PET_NNODES") or "1"


def _read_accelerate_nodes(given: Mapping[str, str], command: Sequence[str]) -> str:
    """Return `num_machines` of the configuration file, YAML or JSON, that `accelerate launch` will use; else empty."""
    if not any(Path(word).name == "accelerate" or word == "accelerate.commands.launch" for word in command):
        return ""
    option = re.search(r"--config[-_]file[= ](\S+)", " ".join(command))
    cache = Path(given.get("XDG_CACHE_HOME") or "~/.cache")
    home = Path(given.get("HF_HOME") or cache / "huggingface")
    file = Path(option[1]) if option is not None else home / "accelerate" / "default_config.yaml"
    try:
        text = file.expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""  # Accelerate itself reports it
    found = re.search(r"""^[\s{]*["']?num_machines["']?\s*:\s*["']?(\d+)""", text, re.MULTILINE)
    return found[1] if found is not None else ""


def _script(command: Sequence[str]) -> str:
    scripts = (Path(word).stem for word in command if word.endswith(".py"))
    modules = (module for option, module in itertools.pairwise(command) if option == "-m")
    return next(scripts, None) or next(modules, None) or Path(command[0]).name
