"""Resuming from disk: a snapshot is never skipped, renamed or deleted because it could not be read."""

from __future__ import annotations

import contextlib
import copy
import errno
import hashlib
import json
import os
import shutil
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch.distributed as dist
from torch import nn

from sentinel.errors import RollbackError
from sentinel.hooks.core import faults, threads
from sentinel.hooks.rollback import framework_checkpoints
from sentinel.hooks.session import resume as resumption
from sentinel.hooks.snapshot import choice, directory, node_parts
from sentinel.hooks.snapshot.choice import Seen, follow_line
from tests.rollback.test_disk import DATA, again, armed, write, write_two
from tests.rollback.training import Training, assert_same
from tests.waiting import until


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with snapshots of steps 5 and 10."""
    folder = tmp_path_factory.mktemp("kept")
    write_two(folder)
    return folder


@pytest.fixture
def place(kept: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(kept, tmp_path / "snapshots"))


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the minute in which reads are tried again to 0.3 s."""
    monkeypatch.setattr(faults, "RETRY_SECONDS", 0.3)


def files_of(place: Path) -> list[str]:
    return sorted(str(path.relative_to(place)) for path in place.rglob("*"))


def rewrite(path: Path, **changes: Any) -> None:
    """Rewrite a manifest with these fields changed and a matching checksum."""
    manifest = json.loads((path / "manifest.json").read_bytes())["manifest"] | changes
    body = msgspec.json.encode({key: value for key, value in manifest.items() if value is not ...})
    (path / "manifest.json").write_bytes(
        b'{"manifest":' + body + b',"sha256":"' + hashlib.sha256(body).hexdigest().encode() + b'"}'
    )


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x10
    path.write_bytes(content)


class Failing:
    """Makes the first `times` reads of paths that contain `name` fail with the error `number`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str, number: int, times: int) -> None:
        self.times = times
        for owner, call in ((Path, "open"), (Path, "read_bytes"), (Path, "stat"), (os, "scandir")):
            self._wrap(monkeypatch, owner, call, name, number)

    def _wrap(self, monkeypatch: pytest.MonkeyPatch, owner: Any, call: str, name: str, number: int) -> None:
        function: Callable[..., Any] = getattr(owner, call)

        def failing(path: Any, *arguments: Any, **more: Any) -> Any:
            if name in Path(path).name and self.times:
                self.times -= 1
                raise OSError(number, os.strerror(number), str(path))
            return function(path, *arguments, **more)

        monkeypatch.setattr(owner, call, failing)


@pytest.mark.parametrize("name", ["snapshots", "manifest.json", "__0_0.distcp", ".metadata"])
@pytest.mark.parametrize("number", [errno.ESTALE, errno.EIO, errno.EMFILE, errno.EACCES])
def test_a_read_that_fails_for_a_moment_costs_nothing(
    place: Path, monkeypatch: pytest.MonkeyPatch, name: str, number: int
) -> None:
    before = files_of(place)
    with monkeypatch.context() as patched:
        failing = Failing(patched, name, number, times=2)
        assert again(Training(), place) == 11
    assert not failing.times
    assert files_of(place) == before


@pytest.mark.parametrize("name", ["snapshots", "step-00000010", "manifest.json", "__0_0.distcp"])
@pytest.mark.usefixtures("short")
def test_a_read_that_goes_on_failing_is_an_error(place: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    before = files_of(place)
    training = Training()
    with monkeypatch.context() as patched:
        if name == "step-00000010":  # the newest alone; the older one could be read
            read = directory.read_manifest
            seen = Seen(str(place / name), "unreadable", os.strerror(errno.ESTALE))
            patched.setattr(directory, "read_manifest", lambda path: seen if path.name == name else read(path))
        else:
            Failing(patched, name, errno.ESTALE, times=10**6)
        with pytest.raises(RollbackError, match=r"Stale file handle.*Nothing was changed"):
            again(training, place)
    assert files_of(place) == before
    assert again(training, place) == 11


class Clock:
    """A clock that advances only in `sleep`."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_a_read_is_tried_again_for_a_minute(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file server that is back after 58 s costs nothing; one that is away for longer is an error after a minute."""
    clock = Clock()
    monkeypatch.setattr(faults, "time", clock)
    read = directory.read_manifest
    back_at = 1058.0

    def read_later(path: Path) -> Any:
        return read(path) if clock.now >= back_at else Seen(str(path), "unreadable", os.strerror(errno.ESTALE))

    with monkeypatch.context() as patched:
        patched.setattr(directory, "read_manifest", read_later)
        assert again(Training(), place) == 11
        clock.now, back_at = 1000.0, 1100.0
        with pytest.raises(RollbackError, match="for 60 s"):
            again(Training(), place)
    assert 1060 < clock.now < 1065


def test_a_damaged_snapshot_is_passed_over_and_set_aside(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flip(place / "step-00000010" / "__0_0.distcp")
    assert again(Training(), place) == 6
    assert directory.steps(place) == [5]
    assert [path.name[:14] for path in place.glob(".void-*")] == [".void-00000010"]
    assert "its checksum is not that of the manifest" in capsys.readouterr().err


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("name", ["manifest.json", "__0_0.distcp"])
def test_a_snapshot_that_stays_cut_short_is_passed_over(place: Path, name: str) -> None:
    path = place / "step-00000010" / name
    os.truncate(path, path.stat().st_size // 2)
    training = Training()
    assert again(training, place) == 6
    assert directory.steps(place) == [5]
    armed(training, place, step=6)  # what was passed over does not keep the run from going on


def test_a_size_that_is_old_for_a_moment(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Network file systems show an outdated size for a moment."""
    examine, looks = directory.DiskSnapshot.examine, []

    def old(self: directory.DiskSnapshot, *, thorough: bool) -> Any:
        looks.append(self.step)
        return ("incomplete", "12 bytes and not 13") if len(looks) < 3 else examine(self, thorough=thorough)

    monkeypatch.setattr(directory.DiskSnapshot, "examine", old)
    assert again(Training(), place) == 11
    assert looks == [10, 10, 10]


def test_nothing_is_touched_where_no_snapshot_can_be_used(place: Path) -> None:
    for step in (5, 10):
        flip(place / f"step-{step:08d}" / "__0_0.distcp")
    before, training = files_of(place), Training()
    state = training.state()["parameters"]
    with pytest.raises(RollbackError, match=r"none can be used: .*step-00000010.*step-00000005.*Nothing was changed"):
        again(training, place)
    assert files_of(place) == before
    assert all(one.equal(other) for one, other in zip(training.state()["parameters"], state, strict=True))


@pytest.mark.parametrize("change", [{"format": 2}, {"files": ["another", "form"]}])
def test_another_versions_format_is_never_touched(place: Path, change: dict[str, Any]) -> None:
    rewrite(place / "step-00000010", **change)
    before, training = files_of(place), Training()
    with pytest.raises(RollbackError, match=r"step-00000010.manifest.json: .*format.*before=10"):
        again(training, place)
    assert files_of(place) == before
    assert again(training, place, before=10) == 6
    restorer, sent = armed(training, place, step=6)
    training.seq = 0
    for seq in range(12):
        training.step(DATA[seq])
        if seq == 6:
            answer = write(restorer, sent, 5, step=10)
            assert "is left alone" in answer.reason
        if seq == 7:
            assert write(restorer, sent, 5, step=11).ok
    restorer.close()
    assert set(before) <= set(files_of(place))


def test_a_run_that_does_not_fit_costs_no_snapshot(place: Path) -> None:
    """Snapshots younger than the chosen one are set aside only once the state is restored."""
    before, training = files_of(place), Training()
    training.model.append(nn.Linear(16, 1))
    with pytest.raises(RollbackError):
        again(training, place, before=10)
    assert files_of(place) == before


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata"])
@pytest.mark.parametrize("content", [b"", b"\x80\x04half a pickle", zlib.compress(bytes(1 << 20)), b"\xff" * 4000])
def test_files_with_right_checksums_that_hold_no_snapshot_are_an_error(place: Path, name: str, content: bytes) -> None:
    """Since no checksum is wrong, such a snapshot is not passed over, and the error is not a traceback from pickle."""
    path = place / "step-00000010"
    (path / name).write_bytes(content)
    files = json.loads((path / "manifest.json").read_bytes())["manifest"]["files"]
    rewrite(path, files=files | {name: msgspec.to_builtins(directory.fingerprint(path / name))})
    before, training = files_of(place), Training()
    former = copy.deepcopy(training.model.state_dict())
    with pytest.raises(RollbackError, match=r"have their checksums and hold no snapshot.* Nothing was changed"):
        again(training, place)
    assert files_of(place) == before
    assert_same(training.model.state_dict(), former)
    assert again(training, place, before=10) == 6


@pytest.mark.parametrize("content", ["[" * 500_000, '{"a":' * 300_000], ids=["lists", "objects"])
def test_a_manifest_that_nests_without_end(place: Path, short: None, content: str) -> None:
    (place / "step-00000010" / "manifest.json").write_text(content)
    assert again(Training(), place) == 6


def test_a_manifest_of_an_earlier_version_names_no_parent(place: Path) -> None:
    for step in (5, 10):
        rewrite(place / f"step-{step:08d}", parent=...)
    assert again(Training(), place) == 11


def test_the_line_that_was_written_to_last_is_followed(place: Path) -> None:
    """A snapshot that an earlier attempt could not set aside is not on that line, though its step is later."""
    shutil.copytree(place / "step-00000010", place / "step-00000020")
    rewrite(place / "step-00000020", step=20, parent=5, time=1.0)
    assert again(Training(), place) == 11
    assert directory.steps(place) == [5, 10]
    assert [path.name[:14] for path in place.glob(".void-*")] == [".void-00000020"]


def test_which_line_of_snapshots_is_followed() -> None:
    def seen(time: float, parent: int | None = None) -> Seen:
        return Seen("", "unchecked", parent=parent, time=time)

    assert follow_line({5: seen(1), 10: seen(2), 15: seen(3)}) == (15, 10, 5)
    assert follow_line({5: seen(1, -1), 10: seen(2, 5), 15: seen(1.5, 10)}) == (15, 10, 5), "a clock that went back"
    assert follow_line({5: seen(1, -1), 10: seen(2, 5), 8: seen(3, 5)}) == (8, 5)
    assert follow_line({5: seen(1, -1), 8: seen(3, 7)}) == (8, 5), "its parent was deleted"
    assert follow_line({5: seen(1), 10: Seen("", "unreadable"), 8: seen(3)}) == (10, 8, 5)


@pytest.mark.slow
def test_what_is_set_aside_is_kept_until_newer_ones_were_read_back(place: Path) -> None:
    flip(place / "step-00000010" / "__0_0.distcp")
    training = Training()
    assert again(training, place) == 6
    restorer, sent = armed(training, place, step=6, disk_keep=2)
    aside = []
    for seq in range(27):
        training.step(DATA[seq % len(DATA)])
        if seq in (6, 11, 16, 21, 26):
            if seq == 11:  # a newer one is damaged on disk: what was set aside may still be of use
                flip(place / "step-00000011" / "__0_0.distcp")
            assert write(restorer, sent, seq - 1, step=seq + 5).ok
            aside.append(len(list(place.glob(".void-*"))))
    restorer.close()
    assert aside == [1, 1, 0, 0, 0]
    assert directory.steps(place) == [26, 31]


def test_a_rename_that_fails_in_a_rollback_is_made_up_for(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is made up for before the next snapshot is written, and no later one follows what is void."""

    def find_parent(step: int) -> int:
        return next(one.manifest.parent for one in directory.list_published(place) if one.step == step)

    training = Training()
    restorer, sent = armed(training, place, step=20, disk_keep=3)
    for seq in range(12):
        training.step(DATA[seq])
        if seq == 6:
            assert write(restorer, sent, 0, step=20).ok
    assert (directory.steps(place), find_parent(20)) == ([5, 10, 20], 10)
    assert restorer.disk is not None
    with monkeypatch.context() as patched:
        patched.setattr(directory, "set_aside", lambda *_: (_ for _ in ()).throw(OSError(errno.ESTALE, "stale")))
        restorer.disk.rewound(7 - 20)
    assert directory.steps(place) == [5, 10, 20]
    assert write(restorer, sent, 10, step=30).ok
    assert directory.steps(place) == [5, 30]
    restorer.disk.rewound(7 - 20)
    assert write(restorer, sent, 10, step=31).ok
    assert (directory.steps(place), find_parent(31)) == ([5, 31], 5)
    restorer.close()


def test_two_rollbacks_whose_renames_fail(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from sentinel.hooks.rollback.disk_writer import DiskWriter

    publisher = DiskWriter(place, 2, 20)
    with monkeypatch.context() as patched:
        patched.setattr(os, "rename", refuse_void(os.rename))
        publisher.rewound(7 - 20)
    publisher.rewound(15 - 20)  # to a snapshot in memory, younger than the one on disk that the first one undid
    assert directory.steps(place) == [5]


def refuse_void(rename: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    def refuse(path: Any, other: Any) -> None:
        if ".void-" in str(other):
            raise OSError(errno.ESTALE, "Stale file handle")
        rename(path, other)

    return refuse


def test_a_rename_that_fails_in_a_resume_is_made_up_for(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run that goes on from an older snapshot is attached all the same, and sets the younger one aside later."""
    training = Training()
    with monkeypatch.context() as patched:
        patched.setattr(os, "rename", refuse_void(os.rename))
        assert again(training, place, before=8) == 6
    assert directory.steps(place) == [5, 10]
    restorer, sent = armed(training, place, step=6)
    with pytest.raises(RollbackError, match="holds a snapshot of step 10"):
        armed(Training(), place, step=6)
    for seq in range(7):
        training.step(DATA[seq])
    assert write(restorer, sent, 5, step=11).ok
    restorer.close()
    assert directory.steps(place) == [5, 11]
    assert again(Training(), place) == 12


def test_a_file_system_that_is_not_mounted_yet(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A start that is known not to be the first one waits for it; the first one makes the directory."""
    mounted = tmp_path / "mount" / "snapshots"
    mounted.parent.mkdir()
    monkeypatch.setenv("SENTINEL_ATTEMPT", "1")
    timer = threading.Timer(0.3, lambda: shutil.copytree(place, mounted))
    timer.start()
    assert again(Training(), mounted) == 11
    timer.join()
    monkeypatch.setattr(faults, "RETRY_SECONDS", 0.3)
    (tmp_path / "other").mkdir()
    with pytest.raises(RollbackError, match=r"empty.*is its file system mounted"):
        again(Training(), tmp_path / "other" / "mount" / "snapshots")
    assert not (tmp_path / "other" / "mount").exists()
    monkeypatch.delenv("SENTINEL_ATTEMPT")
    assert again(Training(), tmp_path / "other" / "mount" / "snapshots") == 0


class Ranks:
    """Ranks that are threads, each with its own view of the disk."""

    def __init__(self) -> None:
        self.store = dist.HashStore()
        self.here = threading.local()
        self.damaged: set[int] = set()
        """Steps that the last `resume` found damaged; they are set aside without another check."""

    def resume(self, places: list[Path], **more: Any) -> list[int | Exception]:
        """Return the step from which each rank goes on, or the error for which it does not."""

        def choose(rank: int, exchange: framework_checkpoints.RankExchange) -> int:
            more.get("before_rank", lambda _: None)(rank)
            taken, self.damaged = resumption._choose(places[rank], more.get("before"), exchange)
            return getattr(taken, "step", -1) + 1

        return self.run(len(places), choose)

    def run(
        self, count: int, action: Callable[[int, framework_checkpoints.RankExchange], int]
    ) -> list[int | Exception]:
        """Return what `action` returns on each rank, or the RollbackError that it raises."""
        results: list[int | Exception] = [0] * count

        def run(rank: int) -> None:
            self.here.place = rank, count
            try:
                results[rank] = action(rank, exchanges[rank])
            except RollbackError as error:
                results[rank] = error

        self.here.place = 0, count
        first = framework_checkpoints.RankExchange("resume")
        exchanges = [copy.copy(first) for _ in range(count)]
        for rank, exchange in enumerate(exchanges):
            exchange.rank = rank
        threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive(), "a rank hangs"
        return results


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ranks]:
    made = Ranks()
    monkeypatch.setattr(framework_checkpoints, "group_store", lambda: made.store)
    monkeypatch.setattr(framework_checkpoints, "place", lambda: made.here.place)
    return made


def test_a_directory_that_one_rank_does_not_see_yet(ranks: Ranks, place: Path, tmp_path: Path) -> None:
    mounted = tmp_path / "mount"
    timer = threading.Timer(0.3, lambda: shutil.copytree(place, mounted))
    timer.start()
    before = files_of(place)
    assert ranks.resume([place, mounted]) == [11, 11]
    timer.join()
    assert files_of(place) == files_of(mounted) == before


def test_the_wait_for_a_rank_that_comes_late_is_no_part_of_the_minute(
    ranks: Ranks, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 comes after that minute, and does not see the directory at first."""
    monkeypatch.setattr(faults, "RETRY_SECONDS", 5.0)
    ahead = [0.0]
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + ahead[0], sleep=time.sleep)
    monkeypatch.setattr(faults, "time", clock)
    decided: list[object] = []

    def decide(*arguments: Any, **more: Any) -> Any:
        decided.append(made := choice.decide(*arguments, **more))
        if len(decided) == 4:  # both have looked twice
            shutil.copytree(place, tmp_path / "mount")
        return made

    look, looked = node_parts.look, threading.Event()

    def look_once(*arguments: Any, **more: Any) -> Any:
        looked.set()
        return look(*arguments, **more)

    def be_late(rank: int) -> None:
        if rank == 1:
            assert looked.wait(30)  # rank 0 has begun
            ahead[0] = 10.0

    monkeypatch.setattr(resumption, "look", look_once)
    monkeypatch.setattr(resumption, "decide", decide)
    assert ranks.resume([place, tmp_path / "mount"], before_rank=be_late) == [11, 11]


def test_a_file_server_that_hangs_is_reported(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A named pipe without a writer stands for the file server."""
    monkeypatch.setattr(threads, "LATE_SECONDS", 0.1)
    with hanging(place, f"resume: reading {place} has taken 0.1 s", capsys):
        assert again(Training(), place) == 11
    training = Training()
    restorer, _ = armed(training, place, step=11)
    assert restorer.disk is not None
    with hanging(place, f"rollback: setting aside what is younger in {place} has taken 0.1 s", capsys):
        restorer.disk.rewound(7 - 11)
    assert directory.steps(place) == [5]
    restorer.close()


def test_a_state_that_takes_long_to_load_is_reported(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(threads, "LATE_SECONDS", 0.1)
    load, said = resumption.load, [""]

    def is_said() -> bool:
        said[0] += capsys.readouterr().err
        return f"resume: reading {place / 'step-00000010'} has taken 0.1 s" in said[0]

    def load_late(*arguments: Any) -> Any:
        until(is_said, "the line")
        return load(*arguments)

    monkeypatch.setattr(resumption, "load", load_late)
    assert again(Training(), place) == 11


def test_a_rollback_is_finished_without_memory_for_the_message(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training()
    assert again(training, place) == 11
    restorer, _ = armed(training, place, step=11)
    assert restorer.disk is not None

    def fail(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(threading, "Timer", fail)
    restorer.disk.rewound(7 - 11)
    assert directory.steps(place) == [5]
    restorer.close()


def test_one_rank_of_a_node_says_what_all_wait_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise AssertionError("another rank of the node says it")

    monkeypatch.setattr(threading, "Timer", fail)
    with threads.say_if_late("resume: reading", speaks=False):
        pass


@contextlib.contextmanager
def hanging(place: Path, words: str, capsys: pytest.CaptureFixture[str]) -> Iterator[None]:
    """Make the manifest of step 10 unreadable until these words are on the terminal."""
    manifest = place / "step-00000010" / "manifest.json"
    kept = manifest.rename(manifest.with_name("kept"))
    os.mkfifo(manifest)
    said: list[str] = []

    def is_said() -> bool:
        said.append(capsys.readouterr().err)
        return words in "".join(said)

    def answer() -> None:
        until(is_said, "the line")
        descriptor, content = os.open(manifest, os.O_WRONLY), kept.read_bytes()
        kept.replace(manifest)
        os.write(descriptor, content)
        os.close(descriptor)

    server = threading.Thread(target=answer)
    server.start()
    yield
    server.join()


@pytest.mark.usefixtures("short")
def test_a_directory_that_one_rank_never_sees(ranks: Ranks, place: Path, tmp_path: Path) -> None:
    before = files_of(place)
    one, other = ranks.resume([place, tmp_path / "mount"])
    assert str(one) == str(other)
    assert "rank 1 does not see" in str(one)
    assert "mounted" in str(one)
    assert not (tmp_path / "mount").exists(), "no rank makes a directory that others have"
    assert files_of(place) == before


@pytest.mark.usefixtures("short")
def test_a_snapshot_that_one_rank_sees_cut_short(ranks: Ranks, place: Path, tmp_path: Path) -> None:
    """For rank 0 the snapshot is whole, so there is no proof that it is damaged."""
    other = Path(shutil.copytree(place, tmp_path / "other"))
    path = other / "step-00000010" / "__0_0.distcp"
    os.truncate(path, 100)
    words = ranks.resume([place, other])
    assert len({str(word) for word in words}) == 1
    assert "rank 1" in str(words[0])
    assert "100 bytes" in str(words[0])


def test_a_snapshot_that_one_rank_proves_damaged(ranks: Ranks, place: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(place, tmp_path / "other"))
    flip(other / "step-00000010" / "__0_0.distcp")
    assert ranks.resume([place, other]) == [6, 6]
