"""`sentinel explain` as it looks in a terminal."""

from __future__ import annotations

import re
import sys

import pytest

from sentinel.cli.explain import explain, find_rule, load_rulebook, sections


def printed(alert: str, capsys: pytest.CaptureFixture[str]) -> str:
    explain.main([alert], standalone_mode=False)
    return re.sub(r"\x1b\[[\d;]*m", "", capsys.readouterr().out)


def test_a_link_is_the_command_or_the_page_that_it_leads_to(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert "; see sentinel explain divergence" in " ".join(printed("non-finite-loss", capsys).split())
    text = " ".join(printed("loss-spike", capsys).split())
    assert "Divergence (sentinel explain divergence) reports it" in text
    assert "noise around zero: docs/loops.md, section reinforcement-learning." in text


@pytest.mark.parametrize("to", ["a terminal", "a file"])
def test_no_section_has_a_dead_link(
    to: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: to == "a terminal")
    rules = load_rulebook().rules
    for name in {rule.runbook for rule in rules if rule.runbook in sections()}:
        text = printed(name, capsys)
        assert not re.search(r"\]\((?!https?:)|\x1b\]8;[^;]*;#", text), name
        for other in re.findall(r"sentinel\s+explain\s+([a-z][a-z-]+[a-z])", text):
            assert find_rule(other, rules)


@pytest.mark.parametrize("written", ["lossspike", "LOSSSPIKE", "loss-spike", "Loss Spike"])
def test_a_name_is_known_however_it_is_written(written: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(written, capsys) == printed("LossSpike", capsys)


def test_each_row_of_a_table_is_a_list_in_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    text = " ".join(re.sub("[^ -~]", " ", printed("rank-lost", capsys)).split())
    row = "ended by SIGABRT (-6, 134) what happened: C++ code aborted what to do: the end of its log"
    assert row in text
