"""Generates wrong uses of each command, from the arguments and options that it takes."""

from __future__ import annotations

import os
import pickle
import sqlite3
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import click

from sentinel.cli import cli

BASES: dict[str, list[str]] = {
    "daemon": ["--directory", "{folder}/file"],  # without this the daemon would serve
    "demo": ["--out", "{folder}/file/below"],
    "doctor": ["make", "train"],
    "grafana push": ["--url", "http://127.0.0.1:1"],
    "mcp": ["--json"],
    "rules backtest": ["{folder}/none", "--jobs", "1"],
    "rules check": ["{folder}/none"],
    "rules test": ["{folder}/none"],
    "run": ["{folder}/no-such-program"],
    "silence": ["LossSpike", "--for", "1s"],
}
"""Arguments that are right, by command; with them a command neither trains nor serves."""


class Case(NamedTuple):
    """One call of a command, and the exit codes that are right."""

    kind: str
    argv: list[str]
    env: dict[str, str]
    stdout: str = "kept"
    cwd: str = ""
    """The working directory; if empty, a folder of the test in which a command may write."""
    codes: tuple[int, ...] = (2,)


class Executes:
    """When it is unpickled, it creates the file `trap`."""

    def __init__(self, trap: Path) -> None:
        self.trap = trap

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.trap}",)


def leaves(group: click.Command = cli, path: tuple[str, ...] = ()) -> Iterator[tuple[str, click.Command]]:
    """Yield (name, command) of each command that can be called."""
    if not isinstance(group, click.Group):
        yield " ".join(path), group
        return
    if path and group.invoke_without_command:
        yield " ".join(path), group
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        yield from leaves(command, (*path, name))


def files(folder: Path) -> dict[str, str]:
    """Return a file or text of each kind of input."""
    (folder / "file").write_text("a file\n")
    (folder / "empty").touch()
    (folder / "junk").write_bytes(bytes(range(256)) * 40)
    (folder / "nested.json").write_text("[" * 300_000)
    (folder / "utf16").write_text("group: mine\n", encoding="utf-16")
    (folder / "pickle").write_bytes(pickle.dumps({"segments": [Executes(folder / "executed")]}))
    with zipfile.ZipFile(folder / "bomb.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("data.pkl", b"\0" * 20_000_000)
    database = sqlite3.connect(folder / "other.sqlite")
    database.execute("CREATE TABLE IF NOT EXISTS cookies (name)")
    database.close()
    return {
        "a file that is not there": str(folder / "none.yaml"),
        "a folder": str(folder),
        "a file that cannot be read": "/proc/self/mem",
        "an endless device": "/dev/zero",
        "an empty file": str(folder / "empty"),
        "bytes of no format": str(folder / "junk"),
        "JSON nested without end": str(folder / "nested.json"),
        "text of another encoding": str(folder / "utf16"),
        "a pickle that executes": str(folder / "pickle"),
        "a zip bomb": str(folder / "bomb.zip"),
        "a database of another program": str(folder / "other.sqlite"),
        "a path that climbs": "../../etc/passwd",
        "nothing": "",
        "orders to the terminal": "a\x1b[2J\x1b]0;owned\x07\nb",
        "bytes that are no text": "caf\udce9.yaml",
        "100,000 characters": "x" * 100_000,
    }


def cases(
    name: str, command: click.Command, folder: Path, inputs: dict[str, str], sockets: dict[str, str]
) -> list[Case]:
    """Return all cases of one command."""
    base = [part.format(folder=folder) for part in BASES.get(name, fill_arguments(command, f"{folder}/none"))]
    made = [*_grammar(name, command, base), *_given(command, base, inputs), *_around(base, folder, inputs, sockets)]
    (here := folder / "here").mkdir(exist_ok=True)
    return [case._replace(argv=[*name.split(), *case.argv], cwd=case.cwd or str(here)) for case in made]


def fill_arguments(command: click.Command, value: str) -> list[str]:
    return [value for parameter in command.params if isinstance(parameter, click.Argument) and parameter.required]


def _grammar(name: str, command: click.Command, base: list[str]) -> Iterator[Case]:
    yield Case("an option that is none", ["--jsno", *base], {}, codes=(2, 127) if name == "run" else (2,))
    if not any(parameter.nargs == -1 for parameter in command.params) and not isinstance(command, click.Group):
        yield Case("too many arguments", [*base, "a", "b", "c", "d"], {})
    for option in command.params:
        if not isinstance(option, click.Option) or option.is_flag or option.hidden:
            continue
        yield Case(f"{option.opts[0]} without its value", [option.opts[0]], {})
        if not isinstance(option.type, click.types.StringParamType | click.Path):
            for value in ("nonsense", "-1", "1e400", "nan", ""):
                yield Case(f"{option.opts[0]}={value}", [f"{option.opts[0]}={value}", *base], {})


def _given(command: click.Command, base: list[str], inputs: dict[str, str]) -> Iterator[Case]:
    """Yield cases with each kind of input in place of the arguments, and of options that name a file."""
    options = base[-2:] if base[-2:-1] and base[-2].startswith("--") else []
    for kind, value in inputs.items():
        if any(isinstance(parameter, click.Argument) for parameter in command.params):
            count = max(1, len(fill_arguments(command, "")))
            yield Case(kind, [*options, "--", *[value] * count], {}, codes=(0, 1, 2, 126, 127))
        for option in command.params:
            if isinstance(option, click.Option) and isinstance(option.type, click.Path):
                yield Case(f"{option.opts[0]}: {kind}", [option.opts[0], value, *base], {}, codes=(0, 1, 2))


def _around(base: list[str], folder: Path, inputs: dict[str, str], sockets: dict[str, str]) -> Iterator[Case]:
    """Yield cases whose command is right, but whose environment is not."""
    any_code = (0, 1, 2, 126, 127)
    for kind in (
        "a file that is not there",
        "a folder",
        "an empty file",
        "bytes of no format",
        "text of another encoding",
    ):
        for variable in ("SENTINEL_CONFIG", "SENTINEL_RULES"):
            yield Case(f"${variable}: {kind}", base, {variable: inputs[kind]}, codes=any_code)
    for variable in ("SENTINEL_STATE", "SENTINEL_RUNTIME", "XDG_CONFIG_HOME", "HOME"):
        yield Case(f"${variable} is a file", base, {variable: str(folder / "file")}, codes=any_code)
    for kind, socket in sockets.items():
        yield Case(kind, base, {"SENTINEL_ADDRESS": socket}, codes=any_code)
    yield Case("nobody reads what it prints", base, {}, "closed", codes=(*any_code, 120))
    yield Case("no room for what it prints", base, {}, "full", codes=(*any_code, 120))
    yield Case("help that nobody reads", ["--help"], {}, "closed", codes=(*any_code, 120))
    yield Case("a terminal of ASCII", base, {"PYTHONIOENCODING": "ascii"}, codes=any_code)
    yield Case("a terminal of one column", base, {"COLUMNS": "1", "LINES": "1"}, codes=any_code)
    yield Case("a working directory that is gone", base, {}, cwd=str(folder / "gone"), codes=any_code)
