"""Every argument, variable, setting, signal and page is documented; commands in the docs exist."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import msgspec
import pytest

import sentinel
from sentinel.config import settings
from sentinel.signals import SIGNALS
from tests.cli.wrong import leaves
from tests.docs.generate import ROOT, list_commands

DOCS = ROOT / "docs"
SETTINGS = (DOCS / "settings.md").read_text()
COMMANDS = dict(list_commands())


@pytest.mark.parametrize("name", [name for name, _ in leaves()])
def test_every_command_says_how_it_ends(name: str) -> None:
    assert re.search("[Ee]xit codes? ", " ".join(COMMANDS[f"sentinel {name}"].replace(":", " ").split()))


@pytest.mark.parametrize("name", [name for name, _ in leaves()])
def test_every_command_speaks_json(name: str) -> None:
    assert any("--json" in parameter.opts for parameter in dict(leaves())[name].params)


@pytest.mark.parametrize("call", [sentinel.attach, sentinel.Rollback], ids=["attach", "Rollback"])
def test_every_argument_is_documented(call: object) -> None:
    for name, parameter in inspect.signature(call).parameters.items():  # type: ignore[arg-type]
        refused = parameter.kind is inspect.Parameter.VAR_POSITIONAL
        assert refused or f"`{name}`" in SETTINGS, name


def test_every_variable_is_documented() -> None:
    files = [*(ROOT / "sentinel").rglob("*.py"), *(ROOT / "hooks").rglob("*.py")] or _installed()
    named = {name for file in files for name in re.findall(r"\bSENTINEL_[A-Z_]*[A-Z]\b", file.read_text())}
    assert named
    for name in named:
        assert name in SETTINGS, name


def _installed() -> list[Path]:
    """Return the installed package's modules, for tests that run beside an installed wheel and not in its tree."""
    return list(Path(next(iter(sentinel.__path__))).rglob("*.py"))


@pytest.mark.parametrize(
    "section",
    [settings.DaemonSettings, settings.LinkSettings, settings.Grouping, settings.HistorySettings],
    ids=lambda kind: kind.__name__,
)
def test_every_setting_is_documented(section: type[msgspec.Struct]) -> None:
    for field in msgspec.structs.fields(section):
        assert re.search(rf"`(\[\w+\] )?{field.encode_name}`", SETTINGS), field.encode_name


@pytest.mark.parametrize("signal", list(SIGNALS))
def test_every_signal_is_documented(signal: str) -> None:
    assert f"`{signal}`" in (DOCS / "rules.md").read_text()


@pytest.mark.parametrize("page", sorted(DOCS.glob("*.md")), ids=lambda page: page.name)
def test_every_page_is_in_the_index(page: Path) -> None:
    assert page.name == "README.md" or f"]({page.name})" in (DOCS / "README.md").read_text()


@pytest.mark.parametrize("page", [ROOT / "README.md", *sorted(DOCS.glob("*.md"))], ids=lambda page: page.name)
def test_commands_in_the_docs_exist(page: Path) -> None:
    """Commands and options that the docs show exist."""
    for line in re.findall(r"^    (sentinel [a-z].*)$", page.read_text(), re.MULTILINE):
        words = re.split(r"\s+", line.split("#")[0].split(" -- ")[0].split("|")[0].strip())
        name = next((" ".join(words[:n]) for n in (3, 2) if " ".join(words[:n]) in COMMANDS), None)
        if words[:2] == ["sentinel", "top"] and "open" in line:  # output of `sentinel top`, not a command
            continue
        assert name, line
        for option in re.findall(r"(?<!\S)--[a-z-]+", " ".join(words)):
            assert option in COMMANDS[name], line
