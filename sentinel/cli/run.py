"""`sentinel run`: a training command, watched, with no line of code."""

from __future__ import annotations

import itertools
import os
import re
import secrets
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import click

import sentinel

_BLIND = frozenset({"-I", "-E", "-S"})
"""Options of Python under which it reads no PYTHONPATH, or no sitecustomize."""


@click.command(
    context_settings={
        "help_option_names": ["-h", "--help"],
        "ignore_unknown_options": True,
        "allow_interspersed_args": False,  # what comes after the command's name is its own, with or without `--`
    },
)
@click.option("--name", help="Name of the run. [default: $SENTINEL_RUN, the script's]")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED, metavar="-- COMMAND...")
def run(name: str | None, command: tuple[str, ...]) -> None:
    """Run a training command, watched, with no line of code.

    Sentinel attaches at the first step of an optimizer, in every process of the command that takes one: ranks are one
    run. The loss of that first step is not seen: it was computed before. An `attach` in the script takes over.
    Processes that do not train are left alone. Nothing is installed: a directory is put in front of PYTHONPATH.

    The exit code and all signals are the command's own: this process becomes it.

    \b
    Example:  sentinel run -- python train.py --lr 3e-4
              sentinel run --name gpt -- torchrun --nproc-per-node 2 train.py
    """
    options = itertools.takewhile(lambda word: word.startswith("-"), command[1:])
    if Path(command[0]).name.startswith("python") and (blind := _BLIND.intersection(options)):
        click.echo(f"sentinel: with {min(blind)} Python does not see Sentinel: training is unmonitored", err=True)
    execute(command, environment(os.environ, command, name))


def environment(given: Mapping[str, str], command: Sequence[str], name: str | None) -> dict[str, str]:
    """What the command needs to be watched: all its processes inherit it."""
    hook = str(Path(sentinel.__file__).parent / "launch")
    paths = [path for path in given.get("PYTHONPATH", "").split(os.pathsep) if path and path != hook]
    made = {**given, "PYTHONPATH": os.pathsep.join([hook, *paths])}
    # A store that torchrun's restarts share keeps addresses of the dead: gloo then hangs (pytorch#135712).
    made.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    if name:
        made["SENTINEL_RUN"] = name
    if "SENTINEL_RUN_ID" not in given and _alone(given, command):
        made["SENTINEL_RUN_ID"] = (
            f"{_plain(name or given.get('SENTINEL_RUN') or _script(command))}-{secrets.token_hex(4)}"
        )
    return made


def execute(command: Sequence[str], environment: Mapping[str, str]) -> None:
    """Become the command. Returns only by SystemExit, as a shell does: 127 not found, 126 not to be executed."""
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.execvpe(command[0], list(command), dict(environment))
    except FileNotFoundError:
        click.echo(f"sentinel: {command[0]}: no such command", err=True)
        sys.exit(127)
    except OSError as error:
        click.echo(f"sentinel: {command[0]}: {error.strerror}", err=True)
        sys.exit(126)


def _alone(given: Mapping[str, str], command: Sequence[str]) -> bool:
    """Whether all ranks are started here. Else the scheduler's id, or torchrun's, is what they share."""
    nodes = re.search(r"--nnodes[= ](\S+)", " ".join(command))
    return "SLURM_JOB_ID" not in given and (nodes is None or nodes[1] in ("1", "1:1"))


def _script(command: Sequence[str]) -> str:
    scripts = (Path(word).stem for word in command if word.endswith(".py"))
    modules = (module for option, module in itertools.pairwise(command) if option == "-m")
    return next(scripts, None) or next(modules, None) or Path(command[0]).name


def _plain(text: str) -> str:
    """What the id of a run may have; it is cut where it is too long."""
    return re.sub(r"[^A-Za-z0-9_-]+", "-", text).strip("-")[:30] or "run"
