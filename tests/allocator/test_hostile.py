"""Malicious allocator snapshots are refused."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from sentinel.errors import ConfigError
from sentinel.toolkit.memory import reading
from sentinel.toolkit.memory.reading import read
from tests.allocator import synthetic
from tests.allocator.synthetic import MiB, segment, snapshot, written


class Executes:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)


def test_a_pickle_that_would_run_a_command_does_not(tmp_path: Path) -> None:
    trap = tmp_path / "executed"
    path = written(tmp_path / "s", {"segments": [Executes(trap)], "device_traces": []})
    with pytest.raises(ConfigError, match=r"it would import .*system"):
        read(path)
    assert not trap.exists()


PROTOCOL_2 = b"\x80\x02"
BOMBS = {
    "a memo index of two billion": PROTOCOL_2 + b"]r\xff\xff\xff\x7f.",
    "a string that says it has 2**62 bytes": b"\x80\x04\x8e" + (2**62).to_bytes(8, "little") + b"x.",
    "a number of 2 GB": PROTOCOL_2 + b"\x8b\xff\xff\xff\x7f.",
    "a persistent reference": PROTOCOL_2 + b"X\x01\x00\x00\x00aQ.",
    "an extension registry": PROTOCOL_2 + b"\x82\x01.",
    "nothing": b"",
    "text": b"segments: []\n",
    "cut off": pickle.dumps(synthetic.torn())[:1000],
    "a number": pickle.dumps(7),
    "other keys": pickle.dumps({"model": {}}),
    "segments that are no list": pickle.dumps({"segments": {"a": 1}}),
    "sizes that are text": pickle.dumps(snapshot([segment([(MiB, "inactive", [])], total_size="9" * 100)])),
    "negative sizes": pickle.dumps(snapshot([segment([(MiB, "inactive", [])], total_size=-1)])),
    "blocks that are numbers": pickle.dumps(snapshot([{**segment([]), "blocks": [1, 2]}])),
    "frames that are text": pickle.dumps(snapshot([segment([(MiB, "inactive", "abc")])])),  # type: ignore[list-item]
}


@pytest.mark.parametrize("bomb", list(BOMBS))
def test_a_file_that_is_no_snapshot_is_refused_in_one_sentence(bomb: str, tmp_path: Path) -> None:
    path = tmp_path / "s.pickle"
    path.write_bytes(BOMBS[bomb])
    with pytest.raises(ConfigError, match=r"s\.pickle: .*snapshot"):
        read(path)


def test_a_list_that_is_referred_to_many_times_counts_each_time(tmp_path: Path) -> None:
    blocks = [{"size": 1, "state": "inactive"}] * 3000
    path = written(tmp_path / "s", {"segments": [{"total_size": 1, "blocks": blocks}] * 3000})
    assert path.stat().st_size < 30_000  # nine million blocks
    with pytest.raises(ConfigError, match="more entries than bytes"):
        read(path)


def test_archives_are_not_unpacked(tmp_path: Path) -> None:
    path = tmp_path / "bomb.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("data.pkl", b"\0" * 10_000_000)
    with pytest.raises(ConfigError, match="a zip archive"):
        read(path)


def test_a_file_that_is_too_large_is_not_opened(tmp_path: Path) -> None:
    path = tmp_path / "huge.pickle"
    with path.open("wb") as file:
        file.truncate(reading.LARGEST + 1)
    with pytest.raises(ConfigError, match=r"at most 2\.1 GB are read"):
        read(path)


@pytest.mark.parametrize("path", ["/no/such/file", "/tmp", "/dev/zero"])
def test_only_files_are_read(path: str) -> None:
    with pytest.raises(ConfigError, match=path):
        read(Path(path))


def test_control_sequences_in_names_do_not_reach_the_terminal(tmp_path: Path) -> None:
    evil = [{"filename": "\x1b]0;owned\x07/a.py", "line": 1, "name": "f\r\n\x1b[2J"}]
    path = written(tmp_path / "s", snapshot([segment([(100 * MiB, "active_allocated", evil)])]))
    done = subprocess.run([sys.executable, "-m", "sentinel", "memory", str(path)], capture_output=True, text=True)
    assert "]0;owned/a.py:1 f[2J" in done.stdout
    assert "\x1b" not in done.stdout


def test_the_limits_are_lifted_again(tmp_path: Path) -> None:
    import resource

    before = resource.getrlimit(resource.RLIMIT_AS)
    read(written(tmp_path / "s", synthetic.torn()))
    assert resource.getrlimit(resource.RLIMIT_AS) == before
