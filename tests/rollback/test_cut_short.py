"""A snapshot on disk that was cut short, at any byte or any system call, is never taken for a good one."""

from __future__ import annotations

import errno
import os
import random
import resource
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sentinel import wire
from sentinel.hooks.rollback import disk_writer
from sentinel.hooks.rollback.restorer import Restorer
from sentinel.hooks.snapshot import checkpoint_files, directory
from tests.rollback.test_disk import DATA, again, armed, write, written
from tests.rollback.training import Training, find_latest, of_type

CALLS = ("open", "write", "fsync", "rename", "mkdir", "unlink")
"""Calls of the operating system that write a snapshot; what torch writes through Python's files is cut by the byte."""


class Killed(BaseException):
    """The process is killed: nothing after this call happens."""


class Calls:
    """Counts the calls that change the disk, and can make one of them the last."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, last: int | None = None, fault: type | None = None) -> None:
        self.count, self._last, self._fault = 0, last, fault
        self.names: list[str] = []
        for name in CALLS:
            monkeypatch.setattr(os, name, self._counted(name, getattr(os, name)))

    def _counted(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **more: Any) -> Any:
            if name == "open" and not (arguments[1] & os.O_WRONLY):
                return call(*arguments, **more)
            self.count += 1
            self.names.append(name)
            if self._last is not None and self.count >= self._last:
                if self._fault is not None:
                    raise OSError(errno.ENOSPC, "No space left on device")
                if name == "write":  # half of the data is written
                    call(arguments[0], arguments[1][: len(arguments[1]) // 2])
                raise Killed
            return call(*arguments, **more)

        return counted


class AtOnce:
    """A worker that makes a call on the thread that submits it, so that what ends the call ends the test's write."""

    def __init__(self, name: str) -> None:
        self.start = self.close = lambda: None

    def submit(self, run: Callable[[], object]) -> SimpleNamespace:
        run()
        return SimpleNamespace(wait=lambda seconds: True)


class Writer:
    """A run with a sound snapshot of step 5 on disk, from which others go on to write that of step 11."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        written(folder / "base")
        monkeypatch.setattr(disk_writer, "Worker", AtOnce)
        monkeypatch.setattr(checkpoint_files, "lower_priority", lambda: None)  # of this thread
        self._folder = folder
        self._restorers: dict[Path, Restorer] = {}

    def folder(self, name: str) -> Path:
        """Return a copy of the folder with the snapshot of step 5, in which a run is about to write the next one."""
        place = Path(shutil.copytree(self._folder / "base", self._folder / name))
        training = Training()
        self._restorers[place], _ = armed(training, place, step=6)
        for seq in range(7):
            training.step(DATA[seq])
        snapshot = self._restorers[place].ring.find(5)
        assert snapshot is not None
        snapshot.wait()  # a forked child has no thread that makes its checksum
        return place

    def write(self, place: Path) -> None:
        self._restorers[place].receive(wire.Publish(id=11, seq=5, step=11, run="train", run_id="r", attempt=0))


@pytest.fixture
def writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Writer:
    return Writer(tmp_path, monkeypatch)


def all_calls(writer: Writer, monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Return the calls that a snapshot makes if nothing interferes."""
    place = writer.folder("whole")
    with monkeypatch.context() as patched:
        whole = Calls(patched)
        writer.write(place)
    assert newest(place) == 11
    return whole


def newest(place: Path) -> int:
    """Return the step to resume from, after a check that everything under a snapshot's name is sound."""
    for snapshot in directory.list_published(place):
        assert snapshot.flaw() == ""
    found = find_latest(place)
    assert found is not None
    return found.step


@pytest.mark.slow
def test_killed_at_every_call(writer: Writer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = all_calls(writer, monkeypatch)
    assert whole.names.count("fsync") >= 6  # of each file, of the folder and of its parent
    after = []
    for last in range(1, whole.count + 1):
        place = writer.folder(str(last))
        with monkeypatch.context() as patched:
            Calls(patched, last=last)
            with pytest.raises(Killed):
                writer.write(place)
        after.append(newest(place))
    assert after == sorted(after)
    assert set(after) == {5, 11}  # the snapshot is whole once it has its name
    assert again(Training(), tmp_path / "1") == 6
    assert again(Training(), tmp_path / str(whole.count)) == 12


@pytest.mark.slow
def test_no_room_at_any_call(writer: Writer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The older snapshot is still there, and the next one that is written removes the remains."""
    whole = all_calls(writer, monkeypatch)
    for last in range(1, whole.count + 1):
        place = writer.folder(str(last))
        with monkeypatch.context() as patched:
            Calls(patched, last=last, fault=OSError)
            writer.write(place)
        assert newest(place) in (5, 11)
    writer.write(tmp_path / "2")
    assert newest(tmp_path / "2") == 11
    assert not [path for path in (tmp_path / "2").iterdir() if path.name.startswith(".")]


@pytest.mark.slow
def test_killed_at_a_byte(writer: Writer) -> None:
    """The kernel kills a real process as soon as a file grows beyond that size."""
    whole = writer.folder("whole")
    writer.write(whole)
    for size in offsets(max(file.bytes for file in directory.list_published(whole)[0].manifest.files.values())):
        place = writer.folder(str(size))
        if (child := os.fork()) == 0:
            signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
            writer.write(place)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        assert os.WTERMSIG(status) == signal.SIGXFSZ
        assert newest(place) == 5


def test_a_full_disk_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training()
    restorer, sent = armed(training, tmp_path)
    for seq in range(7):
        training.step(DATA[seq])
    with monkeypatch.context() as patched:
        Calls(patched, last=1, fault=OSError)
        answer = write(restorer, sent, 5)
    assert not answer.ok
    assert "No space left" in answer.reason
    training.step(DATA[7])
    assert write(restorer, sent, 5).ok
    assert not of_type(sent, wire.RolledBack)


def test_a_write_that_fails_gives_its_room_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a disk that was full for a moment would stay full, for the script's own files too."""
    training = Training()
    restorer, sent = armed(training, tmp_path)
    for seq in range(7):
        training.step(DATA[seq])

    def fail(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", fail)
        answer = write(restorer, sent, 5)
    assert "No space left" in answer.reason
    assert not list(tmp_path.iterdir())
    restorer.close()


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sound")
    written(folder)
    return folder


def offsets(size: int) -> list[int]:
    """Return the first and last offsets of a file of `size` bytes, and some in between."""
    return sorted({0, 1, 2, size // 2, size - 2, size - 1, *random.Random(size).sample(range(size), min(size, 12))})


@pytest.mark.parametrize("name", ["manifest.json", ".metadata", "__0_0.distcp"])
def test_cut_at_a_byte(name: str, sound: Path, tmp_path: Path) -> None:
    original = (sound / "step-00000005" / name).read_bytes()
    shutil.copytree(sound, tmp_path / "cut")
    path = tmp_path / "cut" / "step-00000005" / name
    cuts = range(len(original)) if name == "manifest.json" else offsets(len(original))
    for length in cuts:
        path.write_bytes(original[:length])
        assert find_latest(tmp_path / "cut") is None, length
    path.write_bytes(original + b"\n")
    found = find_latest(tmp_path / "cut")
    assert found is None or name == "manifest.json"  # white space after the JSON changes nothing
    path.unlink()
    assert find_latest(tmp_path / "cut") is None


@pytest.mark.parametrize("name", ["manifest.json", ".metadata", "__0_0.distcp"])
def test_a_bit_that_flips(name: str, sound: Path, tmp_path: Path) -> None:
    original = (sound / "step-00000005" / name).read_bytes()
    shutil.copytree(sound, tmp_path / "flipped")
    path = tmp_path / "flipped" / "step-00000005" / name
    for place in offsets(len(original)):
        flipped = bytearray(original)
        flipped[place] ^= 0x10
        path.write_bytes(flipped)
        assert find_latest(tmp_path / "flipped") is None, place


def test_a_snapshot_under_another_name_is_ignored(sound: Path, tmp_path: Path) -> None:
    place = tmp_path / "kept"
    shutil.copytree(sound, place)
    os.rename(place / "step-00000005", place / ".writing-00000005-1")
    assert find_latest(place) is None
    os.rename(place / ".writing-00000005-1", place / "step-00000099")  # its manifest says step 5
    assert find_latest(place) is None
    os.rename(place / "step-00000099", tmp_path / "step-00000005")
    (place / "step-00000005").symlink_to(tmp_path / "step-00000005")
    assert find_latest(place) is None
