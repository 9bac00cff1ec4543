"""Every command, option, argument, variable, setting and page is documented.

With WRITE_DOCS=1 the reference of commands is written anew.
"""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Iterator
from pathlib import Path

import click
import msgspec
import pytest

import sentinel
from sentinel import config
from sentinel.cli import cli
from sentinel.signals import SIGNALS
from tests.cli.wrong import leaves

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
SETTINGS = (DOCS / "settings.md").read_text()
HEAD = """# Commands

Written by `WRITE_DOCS=1 python -m pytest tests/test_documented.py` from the commands themselves. All end with 0: fine,
1: found something, 2: wrong use; what a command does otherwise, it says.
"""


def commands(command: click.Command = cli, path: tuple[str, ...] = ("sentinel",)) -> Iterator[tuple[str, str]]:
    """(name, help) of every command and group."""
    context = click.Context(
        command, info_name=path[-1], max_content_width=100, terminal_width=100, **command.context_settings
    )
    parents = click.Context(cli, info_name=" ".join(path[:-1])) if len(path) > 1 else None
    context.parent = parents
    yield " ".join(path), command.get_help(context)
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            found = command.get_command(context, name)
            assert found is not None
            yield from commands(found, (*path, name))


def test_every_command_and_option_is_in_the_reference() -> None:
    parts = [f"## {name}\n\n```\n{text.rstrip()}\n```\n" for name, text in commands()]
    reference = "\n".join([HEAD, *parts])
    if os.environ.get("WRITE_DOCS"):
        (DOCS / "commands.md").write_text(reference)
    assert (DOCS / "commands.md").read_text() == reference


@pytest.mark.parametrize("name", [name for name, _ in leaves()])
def test_every_command_says_how_it_ends(name: str) -> None:
    assert re.search("[Ee]xit codes? ", " ".join(dict(commands())[f"sentinel {name}"].replace(":", " ").split()))


@pytest.mark.parametrize("name", [name for name, _ in leaves()])
def test_every_command_speaks_json(name: str) -> None:
    assert any("--json" in parameter.opts for parameter in dict(leaves())[name].params)


@pytest.mark.parametrize("call", [sentinel.attach, sentinel.Rollback], ids=["attach", "Rollback"])
def test_every_argument_is_documented(call: object) -> None:
    for name in inspect.signature(call).parameters:  # type: ignore[arg-type]
        assert f"`{name}`" in SETTINGS, name


def test_every_variable_is_documented() -> None:
    files = [*(ROOT / "sentinel").rglob("*.py"), *(ROOT / "hooks").rglob("*.py")] or _installed()
    named = {name for file in files for name in re.findall(r"\bSENTINEL_[A-Z_]*[A-Z]\b", file.read_text())}
    assert named
    for name in named:
        assert name in SETTINGS, name


def _installed() -> list[Path]:
    """Where the tests run beside an installed wheel, and not in its tree."""
    return list(Path(next(iter(sentinel.__path__))).rglob("*.py"))


@pytest.mark.parametrize("section", [config.Daemon, config.Grouping, config.History], ids=lambda kind: kind.__name__)
def test_every_setting_is_documented(section: type[msgspec.Struct]) -> None:
    for field in msgspec.structs.fields(section):
        assert re.search(rf"`(\[\w+\] )?{field.encode_name}`", SETTINGS), field.encode_name


@pytest.mark.parametrize("signal", list(SIGNALS))
def test_every_signal_is_documented(signal: str) -> None:
    assert f"`{signal}`" in (DOCS / "rules.md").read_text()


@pytest.mark.parametrize("page", sorted(DOCS.glob("*.md")), ids=lambda page: page.name)
def test_every_page_is_in_the_index(page: Path) -> None:
    assert page.name == "README.md" or f"]({page.name})" in (DOCS / "README.md").read_text()


@pytest.mark.parametrize("page", sorted(DOCS.glob("*.md")), ids=lambda page: page.name)
def test_commands_in_the_docs_exist(page: Path) -> None:
    """And so do their options."""
    known = dict(commands())
    for line in re.findall(r"^    (sentinel [a-z].*)$", page.read_text(), re.MULTILINE):
        words = re.split(r"\s+", line.split("#")[0].split(" -- ")[0].split("|")[0].strip())
        name = next((" ".join(words[:n]) for n in (3, 2) if " ".join(words[:n]) in known), None)
        if words[:2] == ["sentinel", "top"] and "open" in line:  # what it shows
            continue
        assert name, line
        for option in re.findall(r"(?<!\S)--[a-z-]+", " ".join(words)):
            assert option in known[name], line
