"""Output of `sentinel` without a command, and of requests for help."""

from __future__ import annotations

import sys

import click
import pytest
from click.testing import CliRunner

from sentinel import errors
from sentinel.cli import cli, main

GROUPS = ["", *(name for name in cli.list_commands(click.Context(cli))
                if isinstance(cli.get_command(click.Context(cli), name), click.Group)
                and cli.get_command(click.Context(cli), name).no_args_is_help)]  # type: ignore[union-attr]  # fmt: skip


@pytest.mark.parametrize("group", GROUPS)
def test_a_group_alone_shows_its_help_once(
    group: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["sentinel", *filter(None, [group])])
    with pytest.raises(SystemExit) as ended:
        main()
    told = capsys.readouterr()
    assert (ended.value.code, told.out) == (2, "")
    assert told.err.startswith("Usage: ")
    assert told.err.count("Usage: ") == 1
    assert "Error" not in told.err
    assert len(GROUPS) > 2


@pytest.mark.parametrize(
    ("words", "completed"), [("inc", "incidents"), ("rules b", "backtest"), ("top --int", "--interval")]
)
def test_commands_complete_in_a_shell(words: str, completed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As docs/quickstart.md describes for bash."""
    monkeypatch.setenv("COMP_WORDS", f"sentinel {words}")
    monkeypatch.setenv("COMP_CWORD", str(len(words.split())))
    result = CliRunner().invoke(cli, env={"_SENTINEL_COMPLETE": "bash_complete"}, prog_name="sentinel")
    assert f"plain,{completed}\n" in result.output


@pytest.mark.parametrize("group", GROUPS)
def test_no_command_is_cut_short_in_a_terminal_of_80_columns(group: str) -> None:
    shown = CliRunner().invoke(cli, [*filter(None, [group]), "--help"], terminal_width=80).output
    assert "..." not in shown.partition("Commands:\n")[2]
    assert max(map(len, shown.splitlines())) <= 80


def test_the_help_of_run_names_each_exit_code_of_its_own() -> None:
    shown = CliRunner().invoke(cli, ["run", "--help"]).output.split()
    codes = {value for name, value in vars(errors).items() if name.startswith("EXIT_")}
    assert len(codes) > 3
    assert {str(code) for code in codes} <= {*shown}
