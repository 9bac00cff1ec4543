"""`sentinel hang` makes the ranks say where they are, and answers as soon as they have."""

from __future__ import annotations

import json
import threading
import time

import pytest
from click.testing import CliRunner, Result

from sentinel import wire
from sentinel.cli import cli
from sentinel.cli import hang as command
from tests.daemon.simulated import SimulatedRank, daemon_process

pytestmark = pytest.mark.processes

DUMP = 'Thread 0x00000001 (most recent call first):\n  File "/x/train.py", line 7 in wait\n'


def start_command() -> tuple[threading.Thread, list[Result]]:
    results: list[Result] = []
    thread = threading.Thread(target=lambda: results.append(CliRunner().invoke(cli, ["hang", "--json"])))
    thread.start()
    return thread, results


def test_the_command_answers_once_all_ranks_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "SURVEY_SECONDS", 3600.0)
    with daemon_process() as (path, _), SimulatedRank(path, 0, 2) as one, SimulatedRank(path, 1, 2) as other:
        for rank in (one, other):
            rank.hello()
        thread, results = start_command()
        for rank in (one, other):
            for _ in range(2):
                ask = rank.expect(wire.Ask)
                assert not results
                content = {"text": DUMP} if ask.what == "stacks" else {}
                rank.say(wire.Reply(id=ask.id, ok=ask.what == "stacks", content=content))
        thread.join(60)
        ((run,),) = [json.loads(result.stdout) for result in results]
    assert run["answered"]
    assert [rank["at"] for rank in run["ranks"]] == ["/x/train.py:7 in wait"] * 2


def test_a_silent_rank_is_waited_for_only_for_a_limited_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "SURVEY_SECONDS", 0.2)
    with daemon_process() as (path, _), SimulatedRank(path) as rank:
        rank.hello()
        began = time.monotonic()
        thread, results = start_command()
        thread.join(60)
        assert time.monotonic() - began > 0.2
        ((run,),) = [json.loads(result.stdout) for result in results]
    assert not run["answered"]
    assert results[0].exit_code == 0
