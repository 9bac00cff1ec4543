"""Sockets and histories: who owns the directory, when it cannot be used, and how to fix that."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sentinel.errors import ConfigError
from sentinel.node import paths


def test_a_run_directory_is_private(private_places: Path) -> None:
    made = paths.private_directory(paths.run_directory("r1"))
    assert made == private_places / "run" / "r1"
    assert made.stat().st_mode & 0o777 == 0o700
    assert made.parent.stat().st_mode & 0o777 == 0o700


def test_a_directory_open_to_others_is_closed() -> None:
    made = paths.private_directory(paths.run_directory("r1"))
    made.chmod(0o777)
    assert paths.private_directory(made).stat().st_mode & 0o777 == 0o700


def test_a_directory_that_serves_others_is_left_as_it_is() -> None:
    made = paths.private_directory(paths.run_directory("r1"))
    (made / "of somebody").touch()
    made.chmod(0o755)
    with pytest.raises(ConfigError, match=r"open to other users and not empty.*chmod 700 it yourself"):
        paths.private_directory(made)
    assert made.stat().st_mode & 0o777 == 0o755


def test_a_directory_of_another_user_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    made = paths.private_directory(paths.run_directory("r1"))
    owner = made.stat().st_uid
    monkeypatch.setattr(os, "getuid", lambda: owner + 1)
    with pytest.raises(ConfigError, match=r"belongs to user .*, not to you .*set SENTINEL_RUNTIME"):
        paths.private_directory(made)


def test_a_link_is_not_followed(private_places: Path, tmp_path: Path) -> None:
    (private_places / "run").symlink_to(tmp_path)
    with pytest.raises(ConfigError, match="is no directory; remove it"):
        paths.private_directory(paths.run_directory("r1"))


def test_a_directory_that_cannot_be_made(private_places: Path) -> None:
    (private_places / "run").write_text("a file is in the way")
    with pytest.raises(ConfigError, match=r"cannot make the directory.*set SENTINEL_RUNTIME"):
        paths.private_directory(paths.run_directory("r1"))


def test_a_path_too_long_for_a_socket(tmp_path: Path) -> None:
    assert paths.socket_path(tmp_path).name == "sentinel.sock"
    with pytest.raises(ConfigError, match=r"at most 107; set SENTINEL_RUNTIME"):
        paths.socket_path(tmp_path / ("x" * 100))


@pytest.mark.parametrize("named", ["tcp:host:1", "http://127.0.0.1", "relative/path", "unix:relative"])
def test_a_malformed_address_is_refused(named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SENTINEL_ADDRESS", named)
    with pytest.raises(ConfigError, match="expected unix:/path"):
        paths.address()


def test_a_named_address_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SENTINEL_ADDRESS", "unix:/somewhere/else.sock")
    assert paths.address() == Path("/somewhere/else.sock")


def test_history_goes_to_the_first_place_that_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SENTINEL_STATE")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert paths.state_directory() == tmp_path / "sentinel"
    monkeypatch.setattr(paths, "file_system", lambda path: "nfs4" if path == tmp_path / "sentinel" else "ext4")
    assert paths.state_directory() == Path(f"/var/tmp/sentinel-{os.getuid()}")


def test_no_place_for_history_names_all_that_were_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SENTINEL_STATE", str(tmp_path / "file" / "below"))
    with pytest.raises(ConfigError, match=r"no place for the history: .*below \(Not a directory\).*set SENTINEL_STATE"):
        paths.state_directory()


def test_the_file_system_of_a_path_is_known() -> None:
    assert paths.file_system(Path("/proc/self")) == "proc"


@pytest.mark.parametrize("name", ["\u00fcbung", "with space", "50%"])
def test_mounts_of_any_name_are_seen(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / name).mkdir()
    point = os.fsencode(tmp_path / name).replace(b" ", rb"\040")
    mounts = b"/dev/sda / ext4 rw 0 0\nfiler:/x " + point + b" nfs4 rw 0 0\n"
    monkeypatch.setattr(Path, "read_bytes", lambda _: mounts)
    assert paths.file_system(tmp_path / name / "below") == "nfs4"
    assert paths.file_system(tmp_path) == "ext4"
