"""Snapshots on disk: how their folder is laid out, which of them are sound, and which one to go on from.

    DIRECTORY/                     0700, ours, of one run
      step-00000400/               the state at the exit of step 400, the user's number
        manifest.json              what is in it: files with sizes and SHA-256, and a SHA-256 of the manifest itself
        .metadata  __0_0.distcp    torch.distributed.checkpoint: an index, and a file of each rank
      .writing-00000600-1c9f/      under way, or cut short. Never looked at
      .void-00000600-...           taken back: of a past that was undone. Deleted when the next one is there
      .removed-00000200-...        being deleted

A snapshot is written under its temporary name and every file synced, the manifest last; then the folder is renamed and
DIRECTORY synced. So there is no moment at which a `step-...` lacks anything; what a dying disk makes of it later, the
checksums tell. They guard against accidents. Against people there is only this: what is not ours, or writable to
others, is not read, since Python objects are in it.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

import msgspec

from sentinel.errors import RollbackError

FORMAT = 1
MANIFEST = "manifest.json"
_CHUNK = 1 << 20
_PUBLISHED = re.compile(r"step-(\d{8,})")
_WRITING, _VOID, _REMOVED = ".writing-", ".void-", ".removed-"


class File(msgspec.Struct, frozen=True):
    """One file of a snapshot."""

    bytes: int
    sha256: str


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What a snapshot is, and what it is made of."""

    format: int = FORMAT
    run: str
    run_id: str
    attempt: int
    seq: int
    """The run's ordinal of the step, in its attempt."""
    step: int
    """The user's number of the step at whose exit it was taken. The next one is `step + 1`."""
    world_size: int
    time: float
    """Unix seconds at publication."""
    torch: str
    """Version that wrote it."""
    files: dict[str, File]


class Snapshot(msgspec.Struct, frozen=True):
    """One that is published and whose manifest is whole."""

    path: Path
    manifest: Manifest

    @property
    def step(self) -> int:
        """The step at whose exit it was taken."""
        return self.manifest.step

    def flaw(self, *, thorough: bool = True) -> str:
        """What is wrong with its files; empty if nothing is. `thorough`: read them all, and not their sizes alone."""
        for name, expected in self.manifest.files.items():
            path = self.path / name
            try:
                if path.lstat().st_size != expected.bytes:
                    return f"{path}: {path.lstat().st_size} bytes and not {expected.bytes}"
                if thorough and fingerprint(path).sha256 != expected.sha256:
                    return f"{path}: its checksum is not that of the manifest"
            except OSError as error:
                return f"{path}: {error.strerror}"
        return ""


class _Envelope(msgspec.Struct):
    manifest: msgspec.Raw
    sha256: str


def directory(path: str | os.PathLike[str], *, make: bool = False) -> Path:
    """The folder of snapshots, checked: it is ours, and nobody else may write to it. `make` it where it is missing.

    Raises RollbackError, with the fix.
    """
    place = Path(path).absolute()
    try:
        if make:
            place.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = place.stat()
    except OSError as error:
        raise RollbackError(f"{place}: no snapshots can be kept there ({error.strerror})") from None
    if not stat.S_ISDIR(status.st_mode):
        raise RollbackError(f"{place}: is no directory; name one for the snapshots of this run")
    if status.st_uid != os.geteuid():
        raise RollbackError(
            f"{place}: belongs to user {status.st_uid} and not to you ({os.geteuid()}); snapshots hold Python objects, "
            "and are only read from a directory of your own"
        )
    if status.st_mode & 0o022:
        raise RollbackError(
            f"{place}: others may write to it; snapshots hold Python objects, and are only read from a directory that "
            f"is yours alone: chmod go-w {place}"
        )
    return place


def published(place: Path) -> list[Snapshot]:
    """The snapshots whose manifest is whole, the newest first. Their files have not been looked at."""
    found = []
    for path in _folders(place):
        manifest = read_manifest(path)
        if manifest is not None and _PUBLISHED.fullmatch(path.name) and path.name == name_of(manifest.step):
            found.append(Snapshot(path, manifest))
    return sorted(found, key=lambda snapshot: snapshot.step, reverse=True)


def latest(place: Path, *, before: int | None = None) -> Snapshot | None:
    """The newest sound one, of a step before `before` where that is given. Reads its files, all of them."""
    for snapshot in published(place):
        if (before is None or snapshot.step < before) and not snapshot.flaw():
            return snapshot
    return None


def read_manifest(path: Path) -> Manifest | None:
    """The manifest of the snapshot at `path`; None where there is none, or it is damaged, or of another format."""
    try:
        envelope = msgspec.json.decode((path / MANIFEST).read_bytes(), type=_Envelope)
        if hashlib.sha256(envelope.manifest).hexdigest() != envelope.sha256:
            return None
        manifest = msgspec.json.decode(envelope.manifest, type=Manifest)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return None
    return manifest if manifest.format == FORMAT else None


def name_of(step: int) -> str:
    """Of the folder of a published snapshot."""
    return f"step-{step:08d}"


def working(place: Path, step: int, token: int) -> Path:
    """The temporary folder that all ranks write the snapshot of `step` to; `token` tells two tries apart."""
    return place / f"{_WRITING}{step:08d}-{token:x}"


def fingerprint(path: Path) -> File:
    """Size and SHA-256 of what is in a file."""
    digest, size = hashlib.sha256(), 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            size += len(chunk)
    return File(size, digest.hexdigest())


def write_synced(path: Path, content: bytes) -> None:
    """Write a file so that it is whole or not there: beside it first, synced, renamed."""
    beside = path.with_name(path.name + ".tmp")
    descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        view = memoryview(content)
        while view:
            view = view[os.write(descriptor, view) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    os.rename(beside, path)


def sync_directory(path: Path) -> None:
    """Make what was created and renamed in it last."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def publish(folder: Path, manifest: Manifest) -> Path:
    """Turn the temporary `folder`, whose files are written and synced, into a snapshot; where it is then.

    One of the same step, of an earlier attempt, makes way. Raises OSError.
    """
    body = msgspec.json.encode(manifest)
    envelope = _Envelope(msgspec.Raw(body), hashlib.sha256(body).hexdigest())
    write_synced(folder / MANIFEST, msgspec.json.encode(envelope))
    sync_directory(folder)
    path = folder.with_name(name_of(manifest.step))
    if path.exists():
        _remove(path)
    os.rename(folder, path)
    sync_directory(path.parent)
    return path


def void(place: Path, after: int) -> tuple[int, ...]:
    """Take back the snapshots of steps after `after`: they are of a past that was undone. Which those were."""
    younger = [(step, path) for path in _folders(place) if (step := _step(path)) is not None and step > after]
    for _, path in younger:
        _aside(path, _VOID)
    if younger:
        sync_directory(place)
    return tuple(sorted(step for step, _ in younger))


def retain(place: Path, keep: int) -> None:
    """Delete all but the newest `keep` snapshots, and what writing, deleting and taking back left behind."""
    ours = sorted((step, path) for path in _folders(place) if (step := _step(path)) is not None)
    for _, path in ours[: max(0, len(ours) - keep)]:
        _remove(path)
    for path in _folders(place):
        if path.name.startswith((_WRITING, _VOID, _REMOVED)):
            shutil.rmtree(path, ignore_errors=True)


def steps(place: Path) -> list[int]:
    """The steps of which there is a snapshot, sound or not, rising."""
    return sorted(step for path in _folders(place) if (step := _step(path)) is not None)


def _remove(path: Path) -> None:
    """By a rename first: half of a snapshot must not be found under its name."""
    shutil.rmtree(_aside(path, _REMOVED), ignore_errors=True)


def _aside(path: Path, prefix: str) -> Path:
    aside = path.with_name(f"{prefix}{path.name.removeprefix('step-')}-{secrets.token_hex(4)}")
    os.rename(path, aside)
    return aside


def _step(path: Path) -> int | None:
    match = _PUBLISHED.fullmatch(path.name)
    return int(match[1]) if match else None


def _folders(place: Path) -> Iterator[Path]:
    try:
        yield from [path for path in place.iterdir() if path.is_dir() and not path.is_symlink()]
    except OSError:
        return
