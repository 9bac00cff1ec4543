"""Records judged afterwards give the same incidents as live, from one file or from the files of all ranks."""

from __future__ import annotations

import json
import math
from array import array
from pathlib import Path

import pytest

from sentinel import wire
from sentinel.daemon.replay import replay_records
from sentinel.errors import ConfigError
from sentinel.node import paths as places
from sentinel.rulebook import loader
from sentinel.store import History, Store
from tests.daemon.test_daemon import HEALTHY, sentinel


def hello(rank: int = 0, world: int = 1, run_id: str = "r1") -> wire.Hello:
    identity = wire.Identity(run="train", run_id=run_id, rank=rank, world_size=world, session=f"s{rank}")
    return wire.Hello(version="test", identity=identity)


def steps(first: int, losses: list[float]) -> wire.Batch:
    seqs = range(first, first + len(losses))
    return wire.Batch(
        seqs=array("q", seqs).tobytes(),
        times=array("d", [1e9 + seq * 0.01 for seq in seqs]).tobytes(),
        columns={"loss": wire.Column(array("d", losses).tobytes())},
    )


def record(path: Path, *messages: wire.Message) -> Path:
    path.write_bytes(b"".join(wire.frame(message) for message in messages))
    return path


def judged(*paths: Path) -> list[tuple[str, str, int]]:
    folder = places.state_directory()
    cases = replay_records(
        paths,
        loader.load().rules,
        lambda run: Store(folder / "runs" / f"{run.run_id}.sqlite", run=run.name, run_id=run.run_id),
    )
    return [(case.alert, case.state, case.first_step) for case in cases]


SPIKE = [*HEALTHY[:250], 8.0, 8.5, 9.0, *HEALTHY[250:] * 4]


def test_a_replay_finds_the_incidents_that_would_have_been(tmp_path: Path) -> None:
    batches = [steps(at, SPIKE[at : at + 7]) for at in range(0, len(SPIKE), 7)]
    assert judged(record(tmp_path / "a", hello(), *batches, wire.Goodbye())) == [("LossSpike", "resolved", 250)]
    with History(places.histories()[0]) as history:
        assert list(history.series("loss").values) == SPIKE
        assert history.attempts()[0][2] is not None


def test_a_run_that_was_killed_ends_with_its_last_step_and_not_with_its_replay(tmp_path: Path) -> None:
    batches = [steps(at, HEALTHY[at : at + 50]) for at in (0, 50)]
    goodbye = wire.Goodbye(time=1e9 + 0.5)
    judged(record(tmp_path / "0", hello(0, 2), *batches), record(tmp_path / "1", hello(1, 2), batches[0], goodbye))
    with History(places.histories()[0]) as history:
        ((_, _, ended),) = history.attempts()
    assert ended == pytest.approx(1e9 + 0.99, abs=0.1)


def test_the_files_of_ranks_are_merged_by_time(tmp_path: Path) -> None:
    files = []
    for rank in range(3):
        batches = [steps(at, SPIKE[at : at + 5 + rank]) for at in range(0, len(SPIKE), 5 + rank)]
        files.append(record(tmp_path / f"{rank}", hello(rank, 3), *batches))
    assert judged(*files) == [("LossSpike", "resolved", 250)]
    with History(places.histories()[0]) as history:
        assert list(history.series("loss").seqs) == list(range(len(SPIKE)))
        assert all(len(history.series("loss", rank=rank).seqs) == len(SPIKE) for rank in range(3))


def test_a_last_frame_that_is_cut_is_passed_over(tmp_path: Path) -> None:
    path = record(tmp_path / "a", hello(), steps(0, [1.0, math.nan]), steps(2, [1.0]))
    path.write_bytes(path.read_bytes()[:-5])
    assert judged(path) == [("NonFiniteLoss", "firing", 1)]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "there is no whole message in it"),
        (b"GET / HTTP/1.1\r\n\r\n", "no record of Sentinel's"),
        (wire.frame(wire.Query(protocol=9, what="x")), "recorded with protocol 9, this version replays 1"),
    ],
)
def test_what_is_no_record_is_refused_with_a_reason(tmp_path: Path, content: bytes, words: str) -> None:
    (tmp_path / "odd").write_bytes(content)
    with pytest.raises(ConfigError, match=words):
        judged(tmp_path / "odd")


@pytest.mark.slow
@pytest.mark.processes
def test_sentinel_replay_judges_a_record_and_replaces_no_live_history(tmp_path: Path) -> None:
    path = record(tmp_path / "run.rec", hello(), steps(0, HEALTHY[:20]), steps(20, [math.nan]))
    for _ in range(2):  # a replay replaces what an earlier replay wrote
        done = sentinel("replay", str(path), "--json")
        (case,) = json.loads(done.stdout)
        assert (done.returncode, case["alert"], case["first_step"]) == (1, "NonFiniteLoss", 20)
    assert "NonFiniteLoss" in sentinel("replay", str(path)).stdout
    assert sentinel("incidents", "show", case["id"], "--run", "train").returncode == 0
    Store(places.histories()[0], run="train", run_id="r1").close()
    refused = sentinel("replay", str(path))
    assert refused.returncode == 2
    assert "set SENTINEL_STATE to another directory" in refused.stderr
    missing = sentinel("replay", str(tmp_path / "nothing"))
    assert (missing.returncode, "Traceback" in missing.stderr) == (2, False)


def test_a_healthy_run_has_no_incidents(tmp_path: Path) -> None:
    assert judged(record(tmp_path / "a", hello(), steps(0, HEALTHY), wire.Goodbye())) == []
