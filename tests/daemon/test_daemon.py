"""The real daemon process, with simulated ranks that speak the wire protocol."""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from sentinel import wire
from sentinel.actions.rollback import WAITS
from sentinel.node import paths
from sentinel.store import History
from tests.daemon.simulated import SimulatedRank, daemon_process, ended
from tests.zygote import DAEMON, run_fork

pytestmark = pytest.mark.processes

RNG = random.Random(0)
HEALTHY = [3.0 - seq / 200 + RNG.gauss(0, 0.01) for seq in range(300)]
TERMS = wire.RollbackTerms(every=50, keep=4, margin=20, budget=1)


def sentinel(*arguments: str) -> subprocess.CompletedProcess[str]:
    return run_fork([sys.executable, "-m", "sentinel", *arguments], DAEMON, cwd="/", timeout=60)


def test_a_nan_is_reported_at_once_and_kept() -> None:
    with daemon_process() as (path, process):
        with SimulatedRank(path) as rank:
            rank.hello(step_offset=1000)
            rank.steps(0, HEALTHY[:20])
            rank.steps(20, [math.nan])
            notice = rank.expect(wire.Notice)
            assert "NonFiniteLoss" in notice.text
            assert "step 1020" in notice.text
            assert rank.expect(wire.Attend).steps > 0

            live = sentinel("incidents", "--json")
            (case,) = json.loads(live.stdout)
            assert live.returncode == 1
            assert case.keys() >= {"run", "alert", "severity", "state", "first_step", "step", "members", "diagnosis"}
            assert case["diagnosis"].keys() >= {"cause", "confidence", "evidence", "remedy"}
            assert (case["run"], case["alert"], case["state"]) == ("train", "NonFiniteLoss", "firing")
            assert (case["first_step"], case["step"]) == (1020, 1020)

            status = sentinel("status", "--json")
            (run,) = json.loads(status.stdout)
            assert status.returncode == 1
            assert run["step"] == 1020
            assert run["values"]["loss"] == "NaN"
            rank.say(wire.Goodbye())
        assert ended(process) == 0
    assert not path.exists()
    assert not path.parent.exists()
    afterwards = sentinel("incidents", "show", case["id"], "--run", "train")
    assert afterwards.returncode == 0, afterwards.stderr
    assert "NonFiniteLoss" in afterwards.stdout
    (kept,) = paths.histories()
    with History(kept) as history:
        assert len(history.series("loss").values) == 21


def test_a_daemon_does_not_wait_for_a_run_whose_starter_is_gone() -> None:
    with subprocess.Popen(["sleep", "60"]) as starter:
        with daemon_process("--started-by", str(starter.pid)) as (path, process):
            starter.kill()
            assert ended(process) == 0
        assert not path.parent.exists()


def asked_after_a_spike(rank: SimulatedRank) -> wire.Prepare:
    """Report healthy steps with snapshots, then a spike, and return the daemon's order to prepare."""
    rank.hello(rollback=TERMS)
    for start in range(0, 250, 50):
        rank.steps(start, HEALTHY[start : start + 50], step_seconds=[0.1] * 50)
        rank.say(wire.SnapshotTaken(seq=start, nbytes=1, seconds=0.1, time=0.0))
    rank.steps(250, [8.0, 8.5, 9.0, 9.5], step_seconds=[0.1] * 4)
    return rank.expect(wire.Prepare)


@pytest.mark.slow
def test_a_spike_is_rolled_back_by_promise_and_commit() -> None:
    with daemon_process() as (path, process), SimulatedRank(path) as rank:
        prepare = asked_after_a_spike(rank)
        assert prepare.to == 200
        assert prepare.at > 253
        # The order came too late: the daemon aims at a later step.
        rank.say(wire.Prepared(id=prepare.id, ok=False, seq=prepare.at + 3))
        assert rank.expect(wire.Abort).id == prepare.id
        again = rank.expect(wire.Prepare)
        assert again.at > prepare.at + 3
        rank.say(wire.Prepared(id=again.id, ok=True, seq=again.at - 1))
        assert rank.expect(wire.Commit).id == again.id
        rank.say(wire.RolledBack(id=again.id, ok=True, to=200, at=again.at, seconds=0.2))
        assert "LossSpike" in rank.expect(wire.Notice).text
        assert f"rolled back to step 200 at the exit of step {again.at}" in rank.expect(wire.Notice).text

        # The budget is one rollback: the next spike stops the run.
        after = again.at + 1
        rank.steps(after, HEALTHY[200:260], step_seconds=[0.1] * 60)
        rank.steps(after + 60, [9.0] * 5, step_seconds=[0.1] * 5)
        assert "after 1 rollback(s), which is the budget" in rank.expect(wire.Stop).reason
        (case, _) = json.loads(sentinel("incidents", "--json").stdout)
        assert case["state"] == "rolled_back"
        rank.say(wire.Goodbye(reason="stopped"))
        assert ended(process) == 0


def spiked_and_not_finite(rank: SimulatedRank) -> wire.Prepare:
    """Let two alerts fire that ask for a rollback, the second while the rollback for the first is in progress."""
    first = asked_after_a_spike(rank)
    assert "LossSpike" in rank.expect(wire.Notice).text
    rank.steps(254, [math.nan], step_seconds=[0.1])
    assert "NonFiniteLoss" in rank.expect(wire.Notice).text
    return first


def kept_cases() -> list[dict[str, Any]]:
    with History(paths.histories()[0]) as history:
        return history.incidents()


def done(rank: SimulatedRank, alert: str) -> list[str]:
    found: list[str] = next(case["done"] for case in rank.ask("incidents") if case["alert"] == alert)
    return found


@pytest.mark.slow
def test_an_alert_that_fired_during_a_failed_rollback_gets_a_rollback_of_its_own() -> None:
    with daemon_process() as (path, process), SimulatedRank(path) as rank:
        first = spiked_and_not_finite(rank)
        assert done(rank, "NonFiniteLoss")[-1] == WAITS
        rank.say(wire.Prepared(id=first.id, ok=False, seq=254, reason="not now"))
        own = rank.expect(wire.Prepare)
        assert own.id != first.id
        assert done(rank, "LossSpike")[-1] == "not rolled back: not now"
        assert done(rank, "NonFiniteLoss")[-1] == "rolling back to step 200"
        rank.say(wire.Prepared(id=own.id, ok=True, seq=own.at - 1))
        assert rank.expect(wire.Commit).id == own.id
        rank.say(wire.RolledBack(id=own.id, ok=True, to=200, at=own.at, seconds=0.2))
        assert {case["state"] for case in rank.ask("incidents")} == {"rolled_back"}
        told = f"rolled back to step 200 at the exit of step {own.at}"
        assert done(rank, "LossSpike") == done(rank, "NonFiniteLoss") == [told]
        rank.say(wire.Goodbye())
        assert ended(process) == 0


@pytest.mark.slow
def test_the_next_daemon_makes_that_rollback_too_and_only_once() -> None:
    with daemon_process() as (path, process), SimulatedRank(path) as rank:
        spiked_and_not_finite(rank)
        while not any(WAITS in case["done"] for case in kept_cases()):
            time.sleep(0.02)
        process.kill()
        process.wait()
    with daemon_process() as (path, process), SimulatedRank(path) as rank:
        held = (0, 50, 100, 150, 200)
        rank.say(wire.Hello(version="test", identity=rank.identity, rollback=TERMS, next_seq=255, snapshots=held))
        first = rank.expect(wire.Prepare)
        rank.say(wire.Prepared(id=first.id, ok=False, seq=254, reason="not now"))
        own = rank.expect(wire.Prepare)
        assert own.id != first.id
        rank.say(wire.Prepared(id=own.id, ok=False, seq=254, reason="never"))
        rank.steps(255, [math.nan] * 50, step_seconds=[0.1] * 50)
        assert done(rank, "NonFiniteLoss")[-1] == "not rolled back: never"
        rank.say(wire.Goodbye())
        with pytest.raises(AssertionError, match="closed the connection"):
            rank.expect(wire.Prepare)


@pytest.mark.slow
def test_four_ranks_promise_before_any_restores() -> None:
    with daemon_process() as (path, process), contextlib.ExitStack() as stack:
        ranks = [stack.enter_context(SimulatedRank(path, number, 4)) for number in range(4)]
        for rank in ranks:
            rank.hello(rollback=TERMS)
        for start in range(0, 250, 50):
            for rank in ranks:
                rank.steps(start, HEALTHY[start : start + 50], step_seconds=[0.1] * 50)
                rank.say(wire.SnapshotTaken(seq=start, nbytes=1, seconds=0.1, time=0.0))
        for rank in ranks:
            rank.steps(250, [9.0] * 5, step_seconds=[0.1] * 5)
        prepares = [rank.expect(wire.Prepare) for rank in ranks]
        assert len({prepare.at for prepare in prepares}) == 1
        for rank, prepare in zip(ranks[:3], prepares, strict=False):
            rank.say(wire.Prepared(id=prepare.id, ok=True, seq=prepare.at - 1))
        ranks[3].say(wire.Prepared(id=prepares[3].id, ok=False, seq=prepares[3].at))
        assert [rank.expect(wire.Abort).id for rank in ranks] == [prepares[0].id] * 4
        for rank in ranks:
            again = rank.expect(wire.Prepare)
            rank.say(wire.Prepared(id=again.id, ok=True, seq=again.at - 1))
        assert {rank.expect(wire.Commit).id for rank in ranks} == {again.id}
        for rank in ranks:
            rank.say(wire.RolledBack(id=again.id, ok=True, to=200, at=again.at, seconds=0.2))
        ranks[0].expect(wire.Notice)
        assert "rolled back" in ranks[0].expect(wire.Notice).text
        for rank in ranks:
            rank.say(wire.Goodbye())
        assert ended(process) == 0


def test_a_rank_that_dies_between_promise_and_commit_ends_it_for_all() -> None:
    with daemon_process() as (path, _), contextlib.ExitStack() as stack:
        ranks = [stack.enter_context(SimulatedRank(path, number, 2)) for number in range(2)]
        for rank in ranks:
            rank.hello(rollback=TERMS)
            for start in range(0, 250, 50):
                rank.steps(start, HEALTHY[start : start + 50], step_seconds=[0.1] * 50)
                rank.say(wire.SnapshotTaken(seq=start, nbytes=1, seconds=0.1, time=0.0))
        for rank in ranks:
            rank.steps(250, [9.0] * 5, step_seconds=[0.1] * 5)
        prepare = ranks[0].expect(wire.Prepare)
        ranks[0].say(wire.Prepared(id=prepare.id, ok=True, seq=prepare.at - 1))
        ranks[1].__exit__()
        assert "rank 1" in ranks[0].expect(wire.Abort).reason


@pytest.mark.parametrize("heard", [True, False])
def test_a_rank_whose_connection_breaks_after_the_commit_says_how_it_ended(heard: bool) -> None:
    """The ranks decide among themselves in that case: to report that none was rolled back would be false."""
    with daemon_process() as (path, _), contextlib.ExitStack() as stack:
        ranks = [stack.enter_context(SimulatedRank(path, number, 2)) for number in range(2)]
        for rank in ranks:
            rank.hello(rollback=TERMS)
            for start in range(0, 250, 50):
                rank.steps(start, HEALTHY[start : start + 50], step_seconds=[0.1] * 50)
                rank.say(wire.SnapshotTaken(seq=start, nbytes=1, seconds=0.1, time=0.0))
        for rank in ranks:
            rank.steps(250, [9.0] * 5, step_seconds=[0.1] * 5)
        for rank in ranks:
            prepare = rank.expect(wire.Prepare)
            rank.say(wire.Prepared(id=prepare.id, ok=True, seq=prepare.at - 1))
        commits = [rank.expect(wire.Commit) for rank in ranks]
        ranks[1].__exit__()
        back = stack.enter_context(SimulatedRank(path, 1, 2))
        while back.ask("status")["runs"][0]["ranks"][1]["state"] == "live":  # the daemon has not seen its end yet
            pass
        promise = 0 if heard else commits[1].id
        back.say(wire.Hello(version="test", identity=back.identity, rollback=TERMS, next_seq=260, promise=promise))
        if not heard:
            assert back.expect(wire.Commit) == commits[1]
        for rank in (ranks[0], back):
            rank.say(wire.RolledBack(id=commits[0].id, ok=True, to=200, at=prepare.at, seconds=0.2))
        told = f"rolled back to step 200 at the exit of step {prepare.at}"
        while told not in ranks[0].expect(wire.Notice).text:
            pass


def spiked(rank: SimulatedRank) -> wire.Commit:
    """Report healthy steps and a spike, promise, and return the commit."""
    rank.hello(rollback=TERMS)
    for start in range(0, 250, 50):
        rank.steps(start, HEALTHY[start : start + 50], step_seconds=[0.1] * 50)
        rank.say(wire.SnapshotTaken(seq=start, nbytes=1, seconds=0.1, time=0.0))
    rank.steps(250, [9.0] * 4, step_seconds=[0.1] * 4)
    return promised(rank, 200)


def promised(rank: SimulatedRank, to: int) -> wire.Commit:
    prepare = rank.expect(wire.Prepare)
    assert prepare.to == to
    rank.say(wire.Prepared(id=prepare.id, ok=True, seq=prepare.at - 1))
    return rank.expect(wire.Commit)


def test_a_snapshot_that_is_no_good_is_followed_by_the_next_older_one() -> None:
    with daemon_process() as (path, _), SimulatedRank(path) as rank:
        commit = spiked(rank)
        rank.say(wire.RolledBack(id=commit.id, ok=False, to=200, at=260, seconds=0.1, reason="nan", flawed=True))
        again = promised(rank, 150)
        rank.say(wire.RolledBack(id=again.id, ok=True, to=150, at=265, seconds=0.1))
        rank.expect(wire.Notice)
        assert "rolled back to step 150 at the exit of step 265" in rank.expect(wire.Notice).text


def test_a_snapshot_that_is_no_good_and_has_no_older_one_is_named_by_the_users_count_of_steps() -> None:
    with daemon_process() as (path, _), SimulatedRank(path) as rank:
        rank.hello(rollback=TERMS, step_offset=1000)
        rank.steps(0, HEALTHY[:200], step_seconds=[0.1] * 200)
        rank.say(wire.SnapshotTaken(seq=150, nbytes=1, seconds=0.1, time=0.0))
        rank.steps(200, [*HEALTHY[200:250], 9.0, 9.0, 9.0, 9.0], step_seconds=[0.1] * 54)
        commit = promised(rank, 150)
        rank.say(wire.RolledBack(id=commit.id, ok=False, to=150, at=260, seconds=0.1, reason="nan", flawed=True))
        rank.expect(wire.Notice)
        assert "not rolled back: snapshot 1150 cannot be restored: nan" in rank.expect(wire.Notice).text


def test_a_commit_for_which_a_rank_came_too_late_is_tried_again() -> None:
    """Not all ranks reached the step in time, so the snapshot is still good; the number of tries is limited."""
    with daemon_process() as (path, _), SimulatedRank(path) as rank:
        commit = spiked(rank)
        for at in (260, 265, 270):
            rank.say(wire.RolledBack(id=commit.id, ok=False, to=200, at=at, seconds=10.0, reason="rank 1 was late"))
            if at < 270:
                commit = promised(rank, 200)
        rank.expect(wire.Notice)
        assert "not rolled back: rank 1 was late" in rank.expect(wire.Notice).text


def test_a_restore_that_went_half_way_stops_the_run_and_is_kept() -> None:
    """Without this entry, a daemon after a kill would take the rollback for an interrupted one and begin it again."""
    said = "rank 0 is not in the state that was agreed on: fault"
    with daemon_process() as (path, process), SimulatedRank(path) as rank:
        commit = spiked(rank)
        rank.say(wire.RolledBack(id=commit.id, ok=False, to=200, at=260, seconds=0.1, reason="fault", touched=True))
        assert said in rank.expect(wire.Stop).reason
        rank.ask("status")
        process.kill()
    with History(paths.state_directory() / "runs" / "r1.sqlite") as history:
        (kept,) = history.incidents()
    assert kept["done"][-1] == f"the run is stopped: {said}"


def test_another_protocol_is_refused_with_a_reason() -> None:
    with daemon_process() as (path, process), SimulatedRank(path) as rank:
        rank.say(wire.Hello(protocol=wire.PROTOCOL + 1, version="9.9", identity=rank.identity))
        reason = rank.expect(wire.Refused).reason
        assert f"protocol {wire.PROTOCOL + 1}" in reason
        assert "install the same version" in reason
        assert process.poll() is None


@pytest.mark.parametrize("garbage", [b"GET / HTTP/1.1\r\n\r\n", b"\x00\x00\x00\x05hello", b"\xff" * 64])
def test_nonsense_is_refused_and_other_ranks_are_still_served(garbage: bytes) -> None:
    with daemon_process() as (path, _), SimulatedRank(path) as good:
        good.hello()
        with SimulatedRank(path, run_id="other") as bad:
            bad.send_raw(garbage)
            assert bad.expect(wire.Refused).reason
        good.steps(0, [math.nan])
        assert "NonFiniteLoss" in good.expect(wire.Notice).text


def test_a_rank_that_only_lost_its_connection_goes_on() -> None:
    with daemon_process() as (path, process):
        with SimulatedRank(path) as rank:
            rank.hello()
            rank.steps(0, HEALTHY[:20])
        with SimulatedRank(path) as rank:
            rank.hello(next_seq=25)
            rank.steps(25, [math.nan])
            assert "step 25" in rank.expect(wire.Notice).text
            assert json.loads(sentinel("status", "--json").stdout)[0]["attempt"] == 0
            rank.say(wire.Goodbye())
        assert ended(process) == 0


@pytest.mark.slow
def test_a_second_daemon_at_the_same_place_says_so() -> None:
    with daemon_process() as (path, _):
        second = sentinel("daemon", "--directory", str(path.parent))
        assert second.returncode == 2
        assert "a daemon serves here already" in second.stderr
        assert "Traceback" not in second.stderr


def test_a_daemon_that_is_terminated_leaves_nothing_but_history() -> None:
    with daemon_process() as (path, process), SimulatedRank(path) as rank:
        rank.hello()
        rank.steps(0, HEALTHY[:20])
        rank.steps(20, [math.nan])
        rank.expect(wire.Notice)
        process.terminate()
        assert ended(process) == 0
        assert not path.parent.exists()
    with History(paths.histories()[0]) as history:
        assert len(history.incidents()) == 1


@pytest.mark.slow
def test_no_room_for_history_is_reported_and_alerts_go_on(tmp_path: Path) -> None:
    # For SQLite a limit on the size of files is a full disk; no separate file system is needed.
    script = tmp_path / "small_disk.py"
    script.write_text(
        "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))\n"
        "sys.argv = ['sentinel', *sys.argv[1:]]\nfrom sentinel.cli import main; main()\n"
    )
    directory = paths.run_directory("r1")
    command = [sys.executable, str(script), "daemon", "--directory", str(directory)]
    with subprocess.Popen(command, cwd="/", stderr=subprocess.PIPE, env=dict(os.environ)) as process:
        try:
            assert process.stderr is not None
            while b"serves at" not in process.stderr.readline():
                assert process.poll() is None
            with SimulatedRank(paths.socket_path(directory)) as rank:
                rank.hello()
                names = {f"signal_{number}": [RNG.random() for _ in range(300)] for number in range(200)}
                rank.steps(0, HEALTHY, **names)
                text = rank.expect(wire.Notice).text
                assert "history is not written" in text
                assert "SENTINEL_STATE" in text
                rank.steps(300, [math.nan])
                assert "NonFiniteLoss" in rank.expect(wire.Notice).text
        finally:
            process.kill()


def test_a_bad_rule_file_is_reported_with_its_line_and_other_rules_run(tmp_path: Path) -> None:
    bad = tmp_path / "bad.yaml"
    bad.write_text("group: mine\nrules:\n  - alert: Odd\n    scope: run\n    expr: los > 3\n    severity: warning\n")
    with daemon_process("--rules", str(bad)) as (path, _), SimulatedRank(path) as rank:
        rank.say(wire.Hello(version="test", identity=rank.identity))
        (note,) = rank.expect(wire.Welcome).notes
        assert f"{bad}:5:" in note
        assert "loss" in note
        rank.steps(0, [math.nan])
        assert "NonFiniteLoss" in rank.expect(wire.Notice).text


def test_a_rule_of_the_users_fires() -> None:
    rules = Path(os.environ["SENTINEL_RUNTIME"]).parent / "own.yaml"
    rules.write_text(
        "group: mine\nrules:\n  - alert: TooHigh\n    scope: run\n    expr: loss > 100\n    severity: warning\n"
        "    annotations:\n      summary: 'loss is {loss:.0f}'\n"
    )
    with daemon_process("--rules", str(rules)) as (path, _), SimulatedRank(path) as rank:
        rank.hello()
        rank.steps(0, [101.0])
        assert "loss is 101" in rank.expect(wire.Notice).text


def test_all_threads_of_the_daemon_yield_to_the_training() -> None:
    """A thread that was started before its process became nice would keep its priority."""
    with daemon_process("--nice", "7") as (path, process), SimulatedRank(path) as rank:
        rank.hello()
        rank.steps(0, HEALTHY[:20])
        rank.say(wire.Goodbye())
        rank.expect(wire.Kept)
        threads = list(Path(f"/proc/{process.pid}/task").iterdir())
        wanted = min(os.nice(0) + 7, 19)
        assert {os.getpriority(os.PRIO_PROCESS, int(thread.name)) for thread in threads} == {wanted}
        assert len(threads) > 1


def test_the_daemons_log_can_be_json_lines(tmp_path: Path) -> None:
    (broken := tmp_path / "broken.yaml").write_text("group: mine\nrules: [{alert: Mine}]\n")
    with daemon_process("--json", "--rules", str(broken)) as (path, process):
        process.terminate()
        assert process.stderr is not None
        lines = [json.loads(line) for line in process.stderr]
    assert all(line.keys() == {"time", "level", "logger", "message"} for line in lines)
    errors = [line["message"] for line in lines if line["level"] == "ERROR"]
    assert "broken.yaml:2" in errors[0]
    assert str(path) in next(line["message"] for line in lines if "serves at" in line["message"])
    assert lines[-1]["message"] == "done"
