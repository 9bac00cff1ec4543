"""Statements of the docs about the code, compared with the code."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

import sentinel
from sentinel.cli import cli
from sentinel.rulebook import loader
from tests.docs.generate import ROOT, list_commands

PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
COMMANDS = [name.split()[1:] for name, _ in list_commands()]


@pytest.mark.parametrize("rule", loader.load().rules, ids=lambda rule: rule.name)
def test_every_stock_rule_has_a_section_in_the_runbook(rule: object) -> None:
    sections = re.findall(r"^## (.+)$", (ROOT / "docs" / "runbook.md").read_text(), re.MULTILINE)
    assert rule.runbook in sections  # type: ignore[attr-defined]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#]*)(?:#([^)]*))?\)", page.read_text()):
        to = page.parent / target if target else page
        assert to.exists(), target
        assert not anchor or anchor in list_anchors(to), f"{target}#{anchor}"


def list_anchors(page: Path) -> set[str]:
    """Return what a link to a page may name after `#`: GitHub's anchors of the headings, and the page's own anchors."""
    text = page.read_text()
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {*re.findall(r'<a id="([^"]+)">', text)} | {
        re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings
    }


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: " ".join(command) or "sentinel")
def test_every_command_has_help_with_an_example(command: list[str]) -> None:
    result = CliRunner().invoke(cli, [*command, "--help"])
    assert result.exit_code == 0
    assert "Example:" in result.output or not command


@pytest.mark.parametrize(("page", "most"), [("README.md", 160), ("CONTRIBUTING.md", 120)])
def test_the_pages_that_are_read_first_are_short(page: str, most: int) -> None:
    assert len((ROOT / page).read_text().splitlines()) <= most


def test_files_that_contributing_names_exist() -> None:
    named = re.findall(r"`((?:[\w.]+/)+[\w.]+\.\w+)`", (ROOT / "CONTRIBUTING.md").read_text())
    made_up = re.compile(r"NAME|TOPIC|TYPE")
    package = Path(sentinel.__file__).parent  # an installed package has hooks/ and rules/ inside
    places = ROOT, package.parent, package
    missing = [path for path in named if not any((place / path).exists() for place in places)]
    assert [path for path in missing if not made_up.search(path)] == []
    assert len(named) > 40


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["statsu"], "no such command: statsu; did you mean 'status'?"),
        (["rules", "chekc"], "No such command 'chekc'"),
        (["incidents", "show"], "Missing argument"),
        (["incidents", "show", "9.9"], "no incident 9.9; see `sentinel incidents`"),
        (["explain", "LossSpkie"], "no alert 'LossSpkie'; is LossSpike meant?"),
        (["daemon", "--nice", "high"], "Invalid value for '--nice'"),
        (["rules", "check", "/no/such/file"], "/no/such/file"),
        (["demo", "--fault", "flood"], "'flood' is not one of"),
        (["status", "--jsno"], "No such option"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_use_is_a_sentence_and_exit_code_2(command: list[str], said: str) -> None:
    done = subprocess.run([sys.executable, "-m", "sentinel", *command], cwd="/", capture_output=True, text=True)
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_every_page_is_in_the_navigation_of_the_site() -> None:
    """The navigation is made from the index in docs/README.md, which must therefore list every page."""
    pytest.importorskip("mkdocs", reason="MkDocs is not installed")
    make_nav = runpy.run_path(str(ROOT / "deploy/site_links.py"))["make_nav"]
    nav = make_nav((ROOT / "docs/README.md").read_text())
    pages = [pages for entry in nav for pages in entry.values()]
    found = [page for one in pages for page in ([one] if isinstance(one, str) else one)]
    assert sorted(found) == sorted(["CONTRIBUTING.md", *(path.name for path in (ROOT / "docs").glob("*.md"))])
