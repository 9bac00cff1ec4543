"""Snapshots of which each node wrote a part: which step all ranks take, and what is reported if parts are missing."""

from __future__ import annotations

import errno
import os
import queue
import shutil
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist

from sentinel import wire
from sentinel.errors import RollbackError
from sentinel.hooks.rollback import disk_writer, framework_checkpoints
from sentinel.hooks.session import resume as resumption
from sentinel.hooks.session import resume_over_nodes
from sentinel.hooks.snapshot import checkpoint_files, directory, node_parts
from sentinel.hooks.snapshot.parts import RunState
from sentinel.hooks.snapshot.state_owners import Owners
from tests.rollback.test_disk import DATA, again, armed
from tests.rollback.test_resume import Ranks, files_of, flip, ranks, rewrite, short  # noqa: F401
from tests.rollback.training import Training, of_type, wait_for_disk

pytestmark = pytest.mark.usefixtures("short")
KEEP = 2


class Writer:
    """One rank, on a node of its own, that writes its parts of snapshots."""

    def __init__(self, place: Path, rank: int, world: int, monkeypatch: pytest.MonkeyPatch, *, step: int = 0) -> None:
        for name, value in (("RANK", rank), ("WORLD_SIZE", world), ("LOCAL_RANK", 0), ("LOCAL_WORLD_SIZE", 1)):
            monkeypatch.setenv(name, str(value))
        self.rank, self.training, self.step = rank, Training(), step
        self.restorer, self.sent = armed(self.training, place, step=step, disk_keep=KEEP)

    def write(self, *steps: int, on_all: Sequence[int] = (), floor: int = -1) -> wire.Published:
        """Train on to these steps, and write a snapshot of each."""
        for step in steps:
            while self.training.seq <= step - self.step:
                self.training.step(DATA[self.training.seq % len(DATA)])
            self.training.step(DATA[0])
            self.restorer.receive(
                wire.Publish(
                    id=step + 1, seq=step - self.step, step=step, run="train", run_id="train-1", attempt=0,
                    ranks=(self.rank,), on_all=tuple(on_all), floor=floor,
                )
            )  # fmt: skip
            wait_for_disk(self.restorer)
        answer: wire.Published = of_type(self.sent, wire.Published)[-1]
        assert answer.ok, answer.reason
        return answer

    def close(self) -> None:
        self.restorer.close()


@pytest.fixture
def disks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: Ranks) -> list[Path]:  # noqa: F811
    """Return the disks of two nodes of one rank each, which have written steps 5 and 10."""
    monkeypatch.setattr(resume_over_nodes.socket, "gethostname", lambda: f"host{ranks.here.place[0]}")
    monkeypatch.setattr(disk_writer, "_line", "one start")
    places = [tmp_path / "disk 0", tmp_path / "disk 1"]
    for rank, place in enumerate(places):
        writer = Writer(place, rank, 2, monkeypatch)
        writer.write(5, 10)
        writer.close()
    return places


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the environment of the first of two ranks on two nodes."""
    for name, value in (("RANK", 0), ("WORLD_SIZE", 2), ("LOCAL_RANK", 0), ("LOCAL_WORLD_SIZE", 1)):
        monkeypatch.setenv(name, str(value))


def resume(ranks: Ranks, places: list[Path], **more: Any) -> list[int | Exception]:  # noqa: F811
    """Return the step from which each rank goes on, or the error for which it does not."""
    ranks.store = dist.HashStore()
    return ranks.resume(places, **more)


def part(place: Path, rank: int, step: int) -> Path:
    return directory.path_of(node_parts.place_of(place, rank), step)


def test_the_newest_snapshot_whose_parts_are_all_there_is_taken(disks: list[Path], ranks: Ranks) -> None:  # noqa: F811
    assert resume(ranks, disks) == [11, 11]
    shutil.copytree(disks[1], disks[0], dirs_exist_ok=True)
    assert resume(ranks, [disks[0], disks[0]]) == [11, 11], "in a directory that nodes share"
    assert resume(ranks, [disks[0], disks[0]], before=10) == [6, 6]


def test_what_one_node_did_not_publish_is_passed_over_on_all(disks: list[Path], ranks: Ranks) -> None:  # noqa: F811
    shutil.rmtree(part(disks[1], 1, 10))
    assert resume(ranks, disks) == [6, 6]


def test_a_step_that_one_node_left_out_and_another_wrote_late_hides_no_later_one(
    disks: list[Path],
    ranks: Ranks,  # noqa: F811
) -> None:
    shutil.rmtree(part(disks[0], 0, 5))
    rewrite(part(disks[0], 0, 10), parent=-1)
    left_out, late = (directory.read_manifest(part(disks[rank], rank, step)) for rank, step in ((0, 10), (1, 5)))
    assert isinstance(left_out, directory.Manifest)
    assert isinstance(late, directory.Manifest)
    assert left_out.time < late.time
    assert resume(ranks, disks) == [11, 11]


def test_a_step_before_a_rollback_that_one_node_left_out_hides_no_later_one_where_clocks_differ(
    disks: list[Path],
    ranks: Ranks,  # noqa: F811
) -> None:
    shutil.rmtree(part(disks[1], 1, 5))
    rewrite(part(disks[0], 0, 10), lineage="one start.1")
    rewrite(part(disks[1], 1, 10), lineage="one start.1", parent=-1, time=1.0)
    assert resume(ranks, disks) == [11, 11]


def test_a_snapshot_that_nodes_write_before_and_after_a_rollback_to_it_is_one(
    tmp_path: Path,
    ranks: Ranks,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(disk_writer, "_line", "one start")
    places = [tmp_path / "disk 0", tmp_path / "disk 1"]
    for rank, place in enumerate(places):
        writer = Writer(place, rank, 2, monkeypatch)
        writer.write(5)
        while writer.training.seq < 12:
            writer.training.step(DATA[0])
        if rank == 0:
            writer.write(10)
        assert writer.restorer.disk is not None
        writer.restorer.disk.rewound(10)
        if rank == 1:
            writer.write(10)
        writer.close()
    assert resume(ranks, places) == [11, 11]


@pytest.mark.slow
def test_parts_on_another_host_are_named_and_no_older_ones_taken(
    disks: list[Path],
    ranks: Ranks,  # noqa: F811
) -> None:
    shutil.rmtree(part(disks[1], 1, 5))
    shutil.rmtree(part(disks[0], 0, 5))
    one, other = resume(ranks, [disks[1], disks[0]])
    assert str(one) == str(other)
    path = part(disks[0], 0, 10)
    assert f"rank 0's snapshot of step 10 is on host host1: {path}. Copy it to the same path on host0" in str(one)
    assert path.exists()
    shutil.copytree(node_parts.place_of(disks[1], 1), node_parts.place_of(disks[0], 1))
    assert "rank 0's snapshot of step 10 is on host host1" in str(resume(ranks, [disks[1], disks[0]])[0])
    shutil.copytree(node_parts.place_of(disks[0], 0), node_parts.place_of(disks[1], 0))
    assert resume(ranks, [disks[1], disks[0]]) == [11, 11], "copied"


@pytest.mark.parametrize("made", [True, False])
def test_a_node_that_was_replaced_is_named(
    disks: list[Path],
    ranks: Ranks,  # noqa: F811
    tmp_path: Path,
    made: bool,
) -> None:
    new = tmp_path / "disk of a new node"
    if made:
        new.mkdir(mode=0o700)
    one, other = resume(ranks, [disks[0], new])
    assert str(one) == str(other)
    assert "no node here has rank 1's part of the snapshot of step 10" in str(one)
    assert "Nothing was changed" in str(one)
    assert part(disks[0], 0, 10).exists()


def test_parts_of_two_starts_are_no_snapshot(disks: list[Path], ranks: Ranks) -> None:  # noqa: F811
    rewrite(part(disks[1], 1, 10), lineage="another start.0")
    assert resume(ranks, disks) == [6, 6]


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.EACCES])
@pytest.mark.parametrize("shared", [False, True])
def test_a_part_that_cannot_be_read_is_an_error_and_stays(
    disks: list[Path],
    ranks: Ranks,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    number: int,
    shared: bool,
) -> None:
    places = disks
    if shared:
        shutil.copytree(disks[1], disks[0], dirs_exist_ok=True)
        places = [disks[0], disks[0]]
    manifest = part(places[1], 1, 10) / "manifest.json"
    before = [files_of(place) for place in places]
    read = Path.read_bytes

    def fail(path: Path) -> bytes:
        if path == manifest:
            raise OSError(number, os.strerror(number), str(path))
        return read(path)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "read_bytes", fail)
        one, other = resume(ranks, places)
    assert str(one) == str(other)
    assert f"{manifest}: {os.strerror(number)}" in str(one)
    assert [files_of(place) for place in places] == before
    assert resume(ranks, places) == [11, 11]


@pytest.mark.parametrize("cut", [True, False])
def test_a_part_whose_manifest_is_cut_short_or_gone_is_named(
    disks: list[Path],
    ranks: Ranks,  # noqa: F811
    cut: bool,
) -> None:
    manifest = part(disks[1], 1, 10) / "manifest.json"
    if cut:
        os.truncate(manifest, 20)
    else:
        manifest.unlink()
    one, other = resume(ranks, disks)
    assert str(one) == str(other)
    assert str(manifest) in str(one)
    shutil.rmtree(part(disks[0], 0, 10))
    assert resume(ranks, disks) == [6, 6], "the other part is not there"
    assert not ranks.damaged, "it is not known what it is"


def test_a_damaged_part_is_passed_over_on_all(disks: list[Path], ranks: Ranks) -> None:  # noqa: F811
    path = part(disks[1], 1, 10) / "__1_0.distcp"
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    assert resume(ranks, disks) == [6, 6]
    assert ranks.damaged == {10}


@pytest.mark.slow
def test_a_job_must_resume_with_as_many_ranks(disks: list[Path], ranks: Ranks) -> None:  # noqa: F811
    shutil.copytree(disks[1], disks[0], dirs_exist_ok=True)
    failures = resume(ranks, [disks[0]] * 3)
    words = (
        "was written by 2 ranks on several nodes, and this job has 3: more cannot go on from it. Nodes that "
        "--allow-shrink left out stay out: start 2 ranks. It is left as it is."
    )
    assert all(words in str(one) for one in failures)


@pytest.fixture
def shrunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a job of three nodes with one rank each go on without node 1."""
    members = wire.Members(start=1, nodes=(0, 2), whole=3)
    monkeypatch.setenv("SENTINEL_MEMBERS", msgspec.json.encode(members).decode())
    monkeypatch.setattr(resumption, "find_node", lambda rank: members.nodes[rank])


@pytest.fixture
def three(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: Ranks) -> list[Path]:  # noqa: F811
    """Return the disks of three nodes: nodes 0 and 2 have written steps 5 and 10, node 1 only step 5."""
    monkeypatch.setattr(resume_over_nodes.socket, "gethostname", lambda: f"host{ranks.here.place[0]}")
    monkeypatch.setattr(disk_writer, "_line", "one start")
    places = [tmp_path / f"disk {rank}" for rank in range(3)]
    for rank, place in enumerate(places):
        writer = Writer(place, rank, 3, monkeypatch)
        writer.write(*((5,) if rank == 1 else (5, 10)))
        writer.close()
    return places


def write_other(place: Path, rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write steps 5 and 10 of one rank of three, whose weights differ from those of the others."""
    writer = Writer(place, rank, 3, monkeypatch)
    with torch.no_grad():
        next(writer.training.model.parameters()).add_(1.0)
    writer.write(5, 10)
    writer.close()


def go_on(ranks: Ranks, places: list[Path], monkeypatch: pytest.MonkeyPatch) -> list[int | Exception]:  # noqa: F811
    """Return what `sentinel.resume` returns on each rank, each on a node of its own, or the error that it raises."""
    ranks.store = dist.HashStore()
    monkeypatch.setattr(disk_writer, "_line", "")
    monkeypatch.setattr(resume_over_nodes, "_sharing", "")
    trainings = [Training() for _ in places]

    def resume(rank: int, exchange: framework_checkpoints.RankExchange) -> int:
        ranks.here.exchange = exchange
        return again(trainings[rank], places[rank])

    monkeypatch.setattr(resumption, "RankExchange", lambda _: ranks.here.exchange)
    return ranks.run(len(places), resume)


@pytest.mark.slow
@pytest.mark.usefixtures("shrunk")
def test_fewer_ranks_go_on_from_replicas_and_need_no_part_of_the_node_that_is_lost(
    three: list[Path],
    ranks: Ranks,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert go_on(ranks, [three[0], three[2]], monkeypatch) == [11, 11], "on disks of their own: rank 1 was rank 2"
    assert "what rank 1 had is not seen here, and was not compared" in capsys.readouterr().err
    for place in three[1:]:
        shutil.copytree(place, three[0], dirs_exist_ok=True)
    assert go_on(ranks, [three[0], three[0]], monkeypatch) == [11, 11], "in a directory that nodes share"


@pytest.mark.slow
@pytest.mark.usefixtures("shrunk")
@pytest.mark.parametrize("whole", [True, False])
def test_the_part_of_the_node_that_is_lost_is_compared_where_it_is_seen(
    three: list[Path],
    ranks: Ranks,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    whole: bool,
) -> None:
    shutil.rmtree(three[1])
    write_other(three[1], 1, monkeypatch)
    for place in three[1:]:
        shutil.copytree(place, three[0], dirs_exist_ok=True)
    if whole:
        failures = go_on(ranks, [three[0], three[0]], monkeypatch)
        assert all("was written by 3 ranks, and ranks 0 and 1 had other weights" in str(one) for one in failures)
    else:
        flip(part(three[0], 1, 10) / "__1_0.distcp")
        assert go_on(ranks, [three[0], three[0]], monkeypatch) == [11, 11], "it says nothing"
        assert "what rank 1 had is not seen here, and was not compared" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.usefixtures("shrunk")
def test_fewer_ranks_do_not_go_on_where_ranks_held_parts_of_the_state(
    three: list[Path],
    ranks: Ranks,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shutil.rmtree(three[2])
    write_other(three[2], 2, monkeypatch)
    before = [files_of(place) for place in three]
    one, other = go_on(ranks, [three[0], three[2]], monkeypatch)
    for error in (one, other):
        assert "was written by 3 ranks, and ranks 0 and 2 had other weights" in str(error)
        assert "the parts of node 1 are missing, which the job goes on without" in str(error)
    assert [files_of(place) for place in three] == before, "nor an older one"


@pytest.mark.slow
@pytest.mark.usefixtures("shrunk")
def test_no_rank_goes_on_from_a_part_of_another_node(
    three: list[Path],
    ranks: Ranks,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
) -> None:
    for place in three[1:]:
        shutil.copytree(place, three[0], dirs_exist_ok=True)
    shutil.rmtree(part(three[0], 0, 10))
    assert resume(ranks, [three[0], three[0]]) == [6, 6], "node 2 alone published step 10"
    assert "no node here has rank 0's part of the snapshot of step 10: it is passed over" in capsys.readouterr().err
    shutil.rmtree(part(three[0], 2, 5))
    failures = resume(ranks, [three[0], three[0]], before=10)
    assert all("no node here has rank 1's part of the snapshot of step 5" in str(one) for one in failures)


@pytest.mark.slow
@pytest.mark.usefixtures("shrunk")
def test_a_part_of_the_same_node_that_is_on_another_disk_is_named(
    three: list[Path],
    ranks: Ranks,  # noqa: F811
) -> None:
    failures = resume(ranks, [three[2], three[0]])
    words = f"rank 0's snapshot of step 10 is on host host1: {part(three[0], 0, 10)}"
    assert all(words in str(one) for one in failures)


@pytest.mark.usefixtures("shrunk")
def test_a_part_of_the_same_node_that_cannot_be_read_is_an_error(
    three: list[Path],
    ranks: Ranks,  # noqa: F811
) -> None:
    manifest = part(three[2], 2, 10) / "manifest.json"
    os.truncate(manifest, 20)
    failures = resume(ranks, [three[0], three[2]])
    assert all(str(manifest) in str(one) for one in failures), "no older one is taken"


def test_fewer_ranks_go_on_only_where_the_job_went_on_without_a_node(
    three: list[Path],
    ranks: Ranks,  # noqa: F811
) -> None:
    failures = resume(ranks, [three[0], three[0]])
    assert all("was written by 3 ranks on several nodes, and this job has 2" in str(one) for one in failures)


def test_a_run_does_not_begin_in_a_directory_with_parts(disks: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_writer, "_line", "another start")
    with pytest.raises(RollbackError, match="holds a snapshot of step 10, and this run begins at step 0"):
        Writer(disks[1], 1, 2, monkeypatch)


@pytest.mark.slow
def test_a_node_deletes_what_all_know_to_be_superfluous(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = Writer(tmp_path, 1, 2, monkeypatch)
    steps = range(5, 5 * (KEEP + disk_writer.AHEAD + 1), 5)
    assert writer.write(*steps).kept == tuple(steps), "cut off"
    assert writer.write(35, on_all=(5, 10)).kept == (5, 10, 15, 20, 25, 30, 35)
    answer = writer.write(40, on_all=(10, 30, 35), floor=10)
    assert answer.kept == (10, 15, 20, 25, 30, 35, 40)
    assert answer.safe == 30, "the older of the two newest that all nodes have"
    assert writer.write(45, floor=30).kept == (30, 35, 40, 45)
    writer.close()


def test_only_the_newest_snapshots_of_all_nodes_are_read(disks: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    shared, read = disks[0], list[Path]()
    shutil.copytree(disks[1], shared, dirs_exist_ok=True)
    for rank in range(2):
        for step in range(15, 60, 5):
            shutil.copytree(part(shared, rank, 10), part(shared, rank, step))
            rewrite(part(shared, rank, step), step=step)
    shutil.rmtree(part(shared, 1, 55))
    read_manifest = directory.read_manifest
    monkeypatch.setattr(directory, "read_manifest", lambda path: read.append(path) or read_manifest(path))
    assert node_parts.list_common(shared, 2, KEEP) == [50, 45]
    assert len(read) == 5
    read.clear()
    Writer(shared, 0, 2, monkeypatch, step=60).close()
    assert read == [part(shared, 0, 55)], "the newest that is there"


def test_a_newer_part_that_can_be_copied_is_named_although_an_older_one_is_whole(
    disks: list[Path],
    ranks: Ranks,  # noqa: F811
) -> None:
    stray = part(disks[0], 1, 10)
    stray.parent.mkdir(mode=0o700)
    part(disks[1], 1, 10).rename(stray)
    one, other = resume(ranks, disks)
    assert str(one) == str(other)
    assert f"rank 1's snapshot of step 10 is on host host0: {stray}" in str(one)


def test_a_rank_does_not_wait_for_one_that_could_not_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The daemon orders the next snapshot only once it no longer waits for the first."""
    writer = Writer(tmp_path, 0, 2, monkeypatch)
    for _ in range(7):
        writer.training.step(DATA[0])
    order = wire.Publish(id=1, seq=5, step=5, run="train", run_id="r", attempt=0, ranks=(0, 1))
    writer.restorer.receive(order)
    writer.restorer.receive(msgspec.structs.replace(order, id=2))
    wait_for_disk(writer.restorer)
    reasons = [answer.reason for answer in of_type(writer.sent, wire.Published)]
    assert reasons[-1] == "the snapshot is no longer wanted"
    writer.close()


def test_a_rank_is_free_for_the_next_one_where_another_could_not_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = Writer(tmp_path, 0, 2, monkeypatch)
    for _ in range(7):
        writer.training.step(DATA[0])
    wanted, assemble = queue.Queue[Callable[[], bool]](), checkpoint_files.assemble

    def assemble_and_note(folder: Path, members: Sequence[int], is_wanted: Callable[[], bool]) -> Any:
        wanted.put(is_wanted)
        return assemble(folder, members, is_wanted)

    monkeypatch.setattr(checkpoint_files, "assemble", assemble_and_note)
    order = wire.Publish(id=1, seq=5, step=5, run="train", run_id="r", attempt=0, ranks=(0, 1))
    writer.restorer.receive(order)
    writer.restorer.receive(wire.CancelPublish(id=7))
    assert wanted.get(timeout=60)(), "that order was another"
    writer.restorer.receive(wire.CancelPublish(id=1))
    wait_for_disk(writer.restorer)
    assert of_type(writer.sent, wire.Published)[-1].reason == "the snapshot is no longer wanted"
    writer.write(10)
    assert directory.steps(node_parts.place_of(tmp_path, 0)) == [10]
    writer.close()


@pytest.mark.usefixtures("nodes")
def test_a_first_start_where_the_directory_of_one_node_is_there(
    ranks: Ranks,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made, absent = tmp_path / "disk 0", tmp_path / "disk 1"
    made.mkdir(mode=0o700)
    assert resume(ranks, [made, absent]) == [0, 0]
    monkeypatch.setenv("SENTINEL_ATTEMPT", "1")
    one, other = resume(ranks, [made, absent])
    assert str(one) == str(other)
    assert f"To begin at step 0: mkdir -p {absent} on {socket.gethostname()}" in str(one), "it may be not mounted"


def begin(ranks: Ranks, places: list[Path], monkeypatch: pytest.MonkeyPatch) -> list[int | Exception]:  # noqa: F811
    """Return what `sentinel.resume` returns on each rank, or the error that it raises."""
    monkeypatch.setattr(framework_checkpoints, "EXCHANGE_SECONDS", 5.0)
    monkeypatch.setattr(disk_writer, "_line", "")
    monkeypatch.setattr(resume_over_nodes, "_sharing", "")

    def resume(rank: int, exchange: framework_checkpoints.RankExchange) -> int:
        ranks.here.exchange = exchange
        training = Training()
        return resumption.resume(training.model, training.optimizer, directory=places[rank])

    monkeypatch.setattr(resumption, "RankExchange", lambda _: ranks.here.exchange)
    return ranks.run(len(places), resume)


@pytest.mark.usefixtures("nodes")
def test_a_directory_that_one_node_cannot_make_is_an_error_on_all(
    ranks: Ranks,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    places = [tmp_path / "disk 0", tmp_path / "disk 1"]
    mkdir = Path.mkdir

    def fill(path: Path, *arguments: Any, **more: Any) -> None:
        if path == places[1]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        mkdir(path, *arguments, **more)

    monkeypatch.setattr(Path, "mkdir", fill)
    one, other = begin(ranks, places, monkeypatch)
    reason = f"{places[1]}: no snapshots can be kept there ({os.strerror(errno.ENOSPC)})"
    assert str(one) == f"resume: failed on rank 1: {reason}"
    assert str(other) == reason


@pytest.mark.usefixtures("nodes")
def test_a_file_that_shows_sharing_and_cannot_be_looked_for_counts_as_not_seen(
    ranks: Ranks,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    exists = Path.exists

    def fail(path: Path) -> bool:
        if path.name.startswith(".shared-") and ranks.here.place[0] == 1:
            raise OSError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return exists(path)

    monkeypatch.setattr(Path, "exists", fail)
    assert begin(ranks, [tmp_path, tmp_path], monkeypatch) == [0, 0]
    assert resume_over_nodes.describe_sharing() == "a disk of each node's own"


@pytest.mark.usefixtures("shrunk")
def test_sharded_state_of_a_node_that_is_lost_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training()
    owners = Owners([training.model], [training.optimizer], given=[], scaler=None, scheduler=None, taken=[], call="r")
    run = RunState([training.model], [training.optimizer], owners, {})
    resume_over_nodes.refuse_sharded(Path("step-10"), run, 3)
    monkeypatch.setattr(resume_over_nodes, "spread", lambda _: "a DTensor's place")
    with pytest.raises(RollbackError, match=r"0\.weight is sharded over them: the parts of node 1 are missing"):
        resume_over_nodes.refuse_sharded(Path("step-10"), run, 3)
