"""What is said to somebody who names no command."""

from __future__ import annotations

import sys

import click
import pytest

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
