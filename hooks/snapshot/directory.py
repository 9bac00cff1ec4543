"""Snapshots on disk: how their folder is laid out, which of them are sound, and what becomes of the others.

    DIRECTORY/                     0700, ours, of one run
      step-00000400/               the state at the exit of step 400, the user's number
        manifest.json              what is in it: files with sizes and SHA-256, and a SHA-256 of the manifest itself
        .metadata  __0_0.distcp    torch.distributed.checkpoint: an index, and a file of each rank
      .writing-00000600-1c9f/      under way, or cut short. Never looked at
      .void-00000600-...           set aside: of a past that was undone, or damaged. Kept until as many newer ones as
                                   are kept were read back and found whole
      .removed-00000200-...        being deleted

Over several nodes each has a folder of this layout inside DIRECTORY (`node_parts.py`).

A snapshot is written under its temporary name and every file synced, the manifest last; then the folder is renamed and
DIRECTORY synced. So there is no moment at which a `step-...` lacks anything; later damage by a failing disk is found by
the checksums. They guard against accidents. Against other people the only guard is this: what is not ours, or writable
to others, is not read, since it holds Python objects.

Nothing is renamed or deleted because it cannot be read, or is of another format: see `choice.py`.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import secrets
import shutil
import stat
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path

import msgspec

from sentinel.errors import RollbackError
from sentinel.hooks.snapshot.choice import Seen, State, follow_line

FORMAT = 1
MANIFEST = "manifest.json"
_CHUNK = 1 << 20
_PUBLISHED = re.compile(r"step-(\d{8,})")
_WRITING, _VOID, _REMOVED = ".writing-", ".void-", ".removed-"
_SET_ASIDE = re.compile(r"\.void-(\d{8,})-[0-9a-f]+")


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
    parent: int | None = None
    """Step of the snapshot before it on its line; -1: it is the first; None: written without this field."""
    ranks: tuple[int, ...] = ()
    """The ranks in it, those of one node of several; (): all ranks are in it."""
    node: int = -1
    """Sentinel's number of that node, which stays when a job goes on without others; -1: written without this field."""
    lineage: str = ""
    """Changes when the run is resumed or rolled back. Parts of two nodes belong together only if it is the same."""


class DiskSnapshot(msgspec.Struct, frozen=True):
    """A published snapshot whose manifest is whole."""

    path: Path
    manifest: Manifest

    @property
    def step(self) -> int:
        """The step at whose exit it was taken."""
        return self.manifest.step

    def flaw(self) -> str:
        """Return what is wrong with its files, or keeps them from being read; empty if nothing."""
        return self.examine(thorough=True)[1]

    def examine(self, *, thorough: bool) -> tuple[State, str]:
        """Return whether its files are what was written, and what is wrong with the first that is not.

        `thorough`: read them all, instead of comparing only their sizes.
        """
        for name, expected in self.manifest.files.items():
            path = self.path / name
            try:
                size = path.lstat().st_size
                if size == expected.bytes and thorough and (found := fingerprint(path)) != expected:
                    size = found.bytes
                    if size == expected.bytes:
                        return "damaged", f"{path}: its checksum is not that of the manifest"
            except OSError as error:
                return classify_error(error), f"{path}: {error.strerror}"
            if size != expected.bytes:
                return "incomplete", f"{path}: {size} bytes and not {expected.bytes}"
        return "whole", ""


class _Envelope(msgspec.Struct):
    manifest: msgspec.Raw
    sha256: str


def directory(path: str | os.PathLike[str], *, make: bool = False) -> Path:
    """Return the folder of snapshots, checked: it is ours, and no other user may write to it. `make`: create it if
    missing.

    Raises RollbackError, with the fix.
    """
    place = Path(path).absolute()
    try:
        if make:
            place.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = place.stat()
    except OSError as error:
        raise RollbackError(f"{place}: no snapshots can be kept there ({error.strerror})") from None
    if refusal := refuse_directory(place, status):
        raise RollbackError(refusal)
    return place


def refuse_directory(place: Path, status: os.stat_result) -> str:
    """Return why snapshots are not read from there; empty if they are."""
    if not stat.S_ISDIR(status.st_mode):
        return f"{place}: is no directory; name one for the snapshots of this run"
    if status.st_uid != os.geteuid():
        return (
            f"{place}: belongs to user {status.st_uid} and not to you ({os.geteuid()}); snapshots hold Python objects, "
            "and are only read from a directory of your own"
        )
    if status.st_mode & 0o022:
        return (
            f"{place}: others may write to it; snapshots hold Python objects, and are only read from a directory that "
            f"is yours alone: chmod go-w {place}"
        )
    return ""


def list_published(place: Path) -> list[DiskSnapshot]:
    """List the snapshots whose manifest is whole, the newest first. Their files have not been looked at.

    Raises OSError if `place` cannot be read.
    """
    found = [(path, read_manifest(path)) for _, path in list_snapshots(place)]
    whole = [DiskSnapshot(path, manifest) for path, manifest in found if isinstance(manifest, Manifest)]
    return sorted(whole, key=lambda snapshot: snapshot.step, reverse=True)


def read_manifest(path: Path) -> Manifest | Seen:
    """Read the manifest of the snapshot at `path`; if it cannot be read, return what is seen without it."""
    file = path / MANIFEST
    try:
        if path.is_symlink():
            return Seen(str(path), "foreign", f"{path}: is a link, which is not followed")
        content = file.read_bytes()
    except OSError as error:
        return Seen(str(path), classify_error(error), f"{file}: {error.strerror}")
    try:
        decoded = msgspec.json.decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return Seen(str(path), "incomplete", f"{file}: is cut short or damaged: it is no JSON")
    try:
        envelope = msgspec.json.decode(content, type=_Envelope)
    except msgspec.ValidationError:
        return Seen(str(path), "foreign", _describe_foreign(file, decoded))
    if hashlib.sha256(envelope.manifest).hexdigest() != envelope.sha256:
        return Seen(str(path), "damaged", f"{file}: its checksum differs from the one written in it")
    try:
        manifest = msgspec.json.decode(envelope.manifest, type=Manifest)
    except msgspec.ValidationError:
        return Seen(str(path), "foreign", _describe_foreign(file, decoded["manifest"]))
    if manifest.format != FORMAT:
        return Seen(str(path), "foreign", _describe_foreign(file, decoded["manifest"]))
    if path.name != name_of(manifest.step):
        return Seen(str(path), "foreign", f"{file}: is of step {manifest.step}, and the folder's name is not")
    return manifest


def _describe_foreign(file: Path, manifest: object) -> str:
    written = manifest.get("format") if isinstance(manifest, dict) else None
    if written is not None and written != FORMAT:
        return f"{file}: format {written}, and this version of Sentinel reads format {FORMAT}"
    return f"{file}: is not in a form that this version of Sentinel knows (format {FORMAT})"


def classify_error(error: OSError) -> State:
    """Classify a snapshot by the error of reading one of its files. Only that the file is missing says anything about
    it."""
    return "incomplete" if error.errno == errno.ENOENT else "unreadable"


def name_of(step: int) -> str:
    """Return the name of the folder of a published snapshot."""
    return f"step-{step:08d}"


def path_of(place: Path, step: int) -> Path:
    """Return the path of the published snapshot of `step`."""
    return place / name_of(step)


def working(place: Path, step: int, token: int) -> Path:
    """Return the temporary folder to which all ranks write the snapshot of `step`; `token` tells two tries apart."""
    return place / f"{_WRITING}{step:08d}-{token:x}"


def fingerprint(path: Path) -> File:
    """Return size and SHA-256 of a file's content."""
    digest, size = hashlib.sha256(), 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            size += len(chunk)
    return File(size, digest.hexdigest())


def write_synced(path: Path, content: bytes) -> None:
    """Write a file so that it is whole or does not exist: written beside it, synced, renamed."""
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
    """Sync a directory, so that what was created and renamed in it survives a crash."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def publish(folder: Path, manifest: Manifest) -> None:
    """Turn the temporary `folder`, whose files are written and synced, into a snapshot.

    A snapshot of the same step, of an earlier attempt, is set aside. Raises OSError, and RollbackError if that one
    cannot be read, or is of another format.
    """
    body = msgspec.json.encode(manifest)
    envelope = _Envelope(msgspec.Raw(body), hashlib.sha256(body).hexdigest())
    write_synced(folder / MANIFEST, msgspec.json.encode(envelope))
    sync_directory(folder)
    path = folder.with_name(name_of(manifest.step))
    if os.path.lexists(path):
        if not _may_be_moved(path):
            raise RollbackError(f"{path} is there already, and is left alone: it is not known what it is")
        _rename(path, _VOID)
    os.rename(folder, path)
    sync_directory(path.parent)


def set_aside(place: Path, after: int, damaged: Collection[int] = ()) -> tuple[int, ...]:
    """Rename the snapshots of steps after `after` that are of a past that was undone, or known to be `damaged`.

    Returns their steps. Others that cannot be read, or are of another format, stay where they are. Raises OSError.
    """
    younger = [
        (step, path)
        for step, path in list_snapshots(place)
        if step > after and (step in damaged or _may_be_moved(path))
    ]
    for _, path in younger:
        _rename(path, _VOID)
    if younger:
        sync_directory(place)
    return tuple(sorted(step for step, _ in younger))


def retain(place: Path, keep: int, list_superfluous: Callable[[Sequence[int], int], list[int]] | None = None) -> None:
    """Delete all but the newest `keep` snapshots of the run's line, and what writing and deleting left behind.

    Those that were set aside, or are off the line, are deleted once `keep` snapshots of later steps were read back and
    are whole. `list_superfluous` chooses otherwise from the line, the youngest first. Raises OSError if `place` cannot
    be read.
    """
    ours = {snapshot.step: snapshot for snapshot in list_published(place)}
    line = follow_line({step: describe(one.path, one.manifest) for step, one in ours.items()}) if ours else ()
    kept = line[:keep]
    for step in line[keep:] if list_superfluous is None else list_superfluous(line, keep):
        shutil.rmtree(_rename(ours[step].path, _REMOVED), ignore_errors=True)
    aside = [(step, ours[step].path) for step in ours.keys() - set(line)]
    for path in _list_folders(place):
        if path.name.startswith((_WRITING, _REMOVED)):
            shutil.rmtree(path, ignore_errors=True)
        elif match := _SET_ASIDE.fullmatch(path.name):
            aside.append((int(match[1]), path))
    superfluous = [path for step, path in aside if len(kept) == keep and step < kept[-1]]
    if superfluous and not any(ours[step].flaw() for step in kept):
        for path in superfluous:
            shutil.rmtree(path, ignore_errors=True)


def describe(path: Path, manifest: Manifest) -> Seen:
    """Return what a manifest says of the snapshot at `path`."""
    return Seen(
        str(path), "unchecked", parent=manifest.parent, time=manifest.time, part=bool(manifest.ranks),
        lineage=manifest.lineage if manifest.ranks else "",
    )  # fmt: skip


def list_snapshots(place: Path) -> list[tuple[int, Path]]:
    """List (step, path) of what has the name of a snapshot, sound or not, in rising order. Raises OSError."""
    with os.scandir(place) as entries:
        named = [(entry.name, entry.is_dir() or entry.is_symlink()) for entry in entries]
    found = [(_PUBLISHED.fullmatch(name), name) for name, folder in named if folder]
    return sorted((int(match[1]), place / name) for match, name in found if match)


def steps(place: Path) -> list[int]:
    """List the steps that have a snapshot, sound or not, rising; empty if `place` does not exist. Raises OSError."""
    try:
        return [step for step, _ in list_snapshots(place)]
    except FileNotFoundError:
        return []


def _may_be_moved(path: Path) -> bool:
    """Whether it is known to be ours, of this format: whole, or damaged for certain."""
    found = read_manifest(path)
    return isinstance(found, Manifest) or found.state == "damaged"


def _rename(path: Path, prefix: str) -> Path:
    renamed = path.with_name(f"{prefix}{path.name.removeprefix('step-')}-{secrets.token_hex(4)}")
    os.rename(path, renamed)
    return renamed


def _list_folders(place: Path) -> Iterator[Path]:
    with os.scandir(place) as entries:
        yield from [place / entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
