"""Actions and receivers of another package in a real daemon: some that work and some that do not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sentinel import wire
from sentinel.actions import Context, Shielded
from sentinel.diagnose.case import Case
from sentinel.runs import Attempt
from tests.daemon.simulated import SimulatedRank, daemon_process, ended
from tests.daemon.test_daemon import sentinel
from tests.diagnose.test_evidence import case

pytestmark = pytest.mark.processes

PACKAGE = """
import asyncio
import pathlib
import sys
import msgspec
from sentinel.notify import Delivery

class Note:
    name = "note"

    def __init__(self, context):
        self.context, self.open = context, []

    def act_on(self, case, now):
        case.done = (*case.done, "noting")
        self.open.append(case)

    def tick(self, now):
        for case in self.open:
            case.done = (*case.done[:-1], f"noted among {len(self.context.attempt.ranks)} ranks")
            self.context.changed(case)
        self.open.clear()

class Broken:
    name = "broken"

    def __init__(self, context):
        pass

    def act_on(self, case, now):
        raise RuntimeError("no")

    def tick(self, now):
        sys.exit("never")

class Diary:
    def __init__(self, settings):
        self.path = pathlib.Path(settings.options["path"])

    async def deliver(self, message):
        with self.path.open("a") as file:
            file.write(message.group + " " + message.cases[0].state + "\\n")
        return Delivery()

    async def close(self):
        raise RuntimeError("no")

class Clinging:
    def __init__(self, settings):
        pass

    async def deliver(self, message):
        return Delivery()

    async def close(self):
        await asyncio.Event().wait()

def unmade(settings):
    raise RuntimeError("no")
"""
POINTS = """
[sentinel.actions]
note = theirs:Note
broken = theirs:Broken
missing = theirs:Missing

[sentinel.receivers]
diary = theirs:Diary
clinging = theirs:Clinging
unmade = theirs:unmade
"""


@pytest.fixture
def package(tmp_path: Path) -> Path:
    folder = tmp_path / "site"
    (folder / "theirs-1.dist-info").mkdir(parents=True)
    (folder / "theirs-1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1\n")
    (folder / "theirs-1.dist-info" / "entry_points.txt").write_text(POINTS)
    (folder / "theirs.py").write_text(PACKAGE)
    return folder


@pytest.mark.slow
def test_plugins_are_used_and_their_faults_harm_nothing_else(package: Path, tmp_path: Path) -> None:
    settings, rules, diary = tmp_path / "sentinel.toml", tmp_path / "rules.yaml", tmp_path / "diary"
    settings.write_text(
        "[daemon]\nhttp = 'off'\n[grouping]\nwait = '0s'\n"
        f"[[receivers]]\nname = 'diary'\ntype = 'diary'\noptions = {{ path = '{diary}' }}\n"
        "[[receivers]]\nname = 'lost'\ntype = 'unmade'\n[[receivers]]\nname = 'clings'\ntype = 'clinging'\n"
    )
    rules.write_text(
        "group: mine\nrules:\n  - alert: TooHigh\n    scope: run\n    expr: loss > 100\n    severity: warning\n"
        "    actions: [broken, note, missing]\n"
    )
    options = ("--config", str(settings), "--rules", str(rules))
    with daemon_process(*options, PYTHONPATH=str(package)) as (path, process), SimulatedRank(path) as rank:
        rank.say(wire.Hello(version="test", identity=rank.identity))
        (note,) = rank.expect(wire.Welcome).notes
        assert "receiver lost: unmade cannot be made" in note
        rank.steps(0, [1.0, 101.0])
        fired = rank.expect(wire.Notice)
        assert fired.alert["done"] == ["broken failed; see the daemon's log", "noting"]
        updated = rank.expect(wire.Notice)
        assert (updated.alert["event"], updated.text) == ("updated", "")
        assert updated.alert["done"][-1] == "noted among 1 ranks"
        (case,) = json.loads(sentinel("incidents", "--json").stdout)
        assert case["done"] == updated.alert["done"]
        rank.steps(2, [1.0])
        assert rank.expect(wire.Notice).alert["event"] == "resolved"
        rank.say(wire.Goodbye())
        assert ended(process) == 0
    assert diary.read_text().splitlines()[0] == "r1/TooHigh firing"
    assert diary.read_text().splitlines()[-1] == "r1/TooHigh resolved"


def test_an_action_with_the_former_name_of_its_method_still_acts(caplog: pytest.LogCaptureFixture) -> None:
    class Former:
        name = "former"

        def __init__(self, context: Context) -> None:
            pass

        def fired(self, case: Case, now: float) -> None:
            case.done = (*case.done, "acted")

        def tick(self, now: float) -> None:
            pass

    alert = case("TooHigh", "0")
    context = Context(Attempt(0, 0.0), lambda *_: None, lambda _: None)
    Shielded("former", Former, context).act_on(alert, 0.0)  # type: ignore[arg-type]
    assert alert.done == ("acted",)
    assert "the action former: its method `fired` is called `act_on` now" in caplog.text


@pytest.mark.parametrize(
    ("written", "kept"),
    [((3, OSError("gone")), ("3", "gone")), (["listed"], ("listed",)), (None, ("odd failed; see the daemon's log",))],
    ids=["no text", "a list", "nothing"],
)
def test_what_an_action_writes_can_be_kept_and_told(written: Any, kept: tuple[str, ...]) -> None:
    class Odd:
        name = "odd"

        def __init__(self, context: Context) -> None:
            pass

        def act_on(self, case: Case, now: float) -> None:
            case.done = written

        def tick(self, now: float) -> None:
            pass

    alert = case("TooHigh", "0")
    Shielded("odd", Odd, Context(Attempt(0, 0.0), lambda *_: None, lambda _: None)).act_on(alert, 0.0)
    assert alert.done == kept
    assert alert.builtins()["done"] == kept
