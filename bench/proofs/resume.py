"""Disturbs the snapshots of a run that two ranks resume: they must use the newest intact one, or raise an error.

Two real processes with a process group call `sentinel.resume` on a directory with snapshots of three steps. One or both
of them are disturbed: by errors of the operating system, for a while or for good, by damage, by another format, by what
an earlier attempt left. Each trial checks where both ranks go on, that their weights are those of that snapshot to the
bit, and every file in the directory: only snapshots newer than the one used are renamed, and no file is deleted or
changed.

An error is right only in these cases, and then nothing is touched: a fault that stays, all snapshots damaged, another
version's format in the newest snapshot.

Retrying takes 3 s here instead of a minute, and a fault that passes does so within 1 s: in proportion to 20 s.
"""

from __future__ import annotations

import builtins
import errno
import functools
import hashlib
import io
import json
import os
import random
import resource
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.proofs._forks import end, fork, join_store, leave, silence

TRIALS = 200
SAMPLE = (0, 4, 8, 10)
RANKS = 2
STEPS = (4, 8, 12)
RETRY_SECONDS, PASSES_SECONDS = 3.0, 1.0
JOB_SECONDS = 120.0
CASES = (
    "one rank does not see it, passes", "one rank does not see it, stays", "error, passes", "error, stays",
    "no descriptors, passes", "not mounted, passes", "not mounted, stays", "cut, passes", "cut, stays", "flipped",
    "all flipped", "other format", "older of another format", "left by an earlier attempt", "flipped, and error passes",
    "before", "nothing there",
)  # fmt: skip
ERRORS = (errno.ESTALE, errno.EIO, errno.ENETDOWN, errno.EACCES, errno.EINTR)


def run_trial(seed: int) -> dict[str, Any]:
    """Resume a run with two ranks once, and check the result."""
    case, chance = CASES[seed % len(CASES)], random.Random(seed)
    with tempfile.TemporaryDirectory(prefix="p") as name:
        folder = Path(name)
        shutil.copytree(_write_snapshots(), folder / "disk" / "snapshots")
        trial = _Trial(folder, case, chance)
        trial.disturb()
        before = trial.intact or _list_files(trial.place)
        children = [fork(functools.partial(trial.resume, rank)) for rank in range(RANKS)]
        trial.mend_later()
        deadline = time.monotonic() + JOB_SECONDS
        while not all((folder / f"{rank}.json").exists() for rank in range(RANKS)) and time.monotonic() < deadline:
            time.sleep(0.01)
        for child in children:
            end(child)
        assert time.monotonic() < deadline, f"{case}: a rank hangs"
        trial.mend_now()
        said = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(RANKS)]
        trial.check(said, before)
    return {"case": case, "used": int(said[0]["step"] is not None), "errors": int(said[0]["step"] is None)}


class _Trial:
    def __init__(self, folder: Path, case: str, chance: random.Random) -> None:
        self.folder, self.case, self._chance = folder, case, chance
        self._mount = folder / "disk"
        self.place = self._mount / "snapshots"
        self._rank = chance.randrange(RANKS)
        """The rank that is disturbed, in the cases that disturb only one."""
        self._seconds = chance.uniform(0.1, PASSES_SECONDS)
        self._number = chance.choice(ERRORS)
        self._where = chance.choice(("snapshots", "manifest.json", "__0_0.distcp", ".metadata"))
        self._before: int | None = None
        self._environment: dict[str, str] = {}
        self._mend: Callable[[], object] = lambda: None
        self.expected: int | None = STEPS[-1]
        """Step of the snapshot that must be used; -1: begin at step 0; None: an error."""
        self.moved: set[int] = set()
        self.intact: dict[str, str] = {}
        """The files as they must be in the end, if that is not what the ranks find first."""

    def disturb(self) -> None:
        """Put the disk into the state that the ranks find."""
        newest, file = STEPS[-1], self._pick_file()
        match self.case:
            case "one rank does not see it, stays" | "error, stays":
                self.expected = None
            case "not mounted, passes" | "not mounted, stays":
                self._environment["SENTINEL_ATTEMPT"] = "1"
                self._mount.rename(self.folder / "away")
                self._mount.mkdir()
                self.place = self.folder / "away" / "snapshots"
                self._mend = self._mount_again
                self.expected = None if self.case.endswith("stays") else newest
            case "cut, passes" | "cut, stays":
                content = file.read_bytes()
                if self.case.endswith("passes"):
                    self.intact = _list_files(self.place)
                os.truncate(file, self._chance.randrange(len(content)))
                self._mend = functools.partial(file.write_bytes, content)
                if self.case.endswith("stays"):
                    self.expected, self.moved = STEPS[-2], {newest}
            case "flipped" | "flipped, and error passes":
                damaged = STEPS[-self._chance.choice((1, 2)) :]
                for step in damaged:
                    self._flip(step)
                self.expected, self.moved = STEPS[-1 - len(damaged)], set(damaged)
            case "all flipped":
                for step in STEPS:
                    self._flip(step)
                self.expected = None
            case "other format":
                self._rewrite(newest, format=2)
                self.expected = None
                if self._chance.random() < 0.5:
                    self._before = newest
                    self.expected = STEPS[-2]
            case "older of another format":
                self._rewrite(STEPS[0], format=2)
            case "left by an earlier attempt":
                shutil.copytree(self._path(STEPS[1]), self._path(40))
                self._rewrite(40, step=40, parent=STEPS[0], time=1.0)
                self.moved = {40}
            case "before":
                self._before = self._chance.choice((STEPS[1] + 1, STEPS[2]))
                self.expected, self.moved = STEPS[1], {newest}
            case "nothing there":
                shutil.rmtree(self.place)
                self.expected = -1

    def mend_later(self) -> None:
        """End the disk's faults that pass, after a while."""
        if self.case in ("not mounted, passes", "cut, passes"):
            time.sleep(self._seconds)
            self._mend()
            self._mend = lambda: None

    def mend_now(self) -> None:
        """Mount the disk again if it stayed away, so that its files can be checked."""
        if self.case == "not mounted, stays":
            self._mount_again()

    def resume(self, rank: int) -> None:
        """Resume as one rank, and write down the result."""
        import torch
        import torch.distributed as dist

        import sentinel
        from sentinel.errors import RollbackError
        from sentinel.hooks.core import faults

        faults.RETRY_SECONDS = RETRY_SECONDS
        silence()
        os.environ.update(self._environment | {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS)})
        store = join_store(self.folder, host=rank == 0)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
        model, optimizer = _make(torch.Generator().manual_seed(7 + rank))
        place = self._disturb_rank(rank)
        found: dict[str, Any] = {"step": None, "error": ""}
        state = _digest(model)
        try:
            found["step"] = sentinel.resume(model, optimizer, directory=place, before=self._before) - 1
        except RollbackError as error:
            found["error"] = str(error)
        found["touched"] = _digest(model) != state
        found["weights"] = _digest(model)
        leave(self.folder / f"{rank}.json", json.dumps(found))
        deadline = time.monotonic() + JOB_SECONDS  # keep the store until the other rank has finished with it
        while not (self.folder / f"{1 - rank}.json").exists() and time.monotonic() < deadline:
            time.sleep(0.01)

    def _disturb_rank(self, rank: int) -> Path:
        """Disturb one rank's view of the disk; return the directory as this rank names it."""
        place, mine = self._mount / "snapshots", rank == self._rank
        until = time.monotonic() + (self._seconds if self.case.endswith("passes") else 1000.0)
        if self.case.startswith("one rank") and mine:
            own = self.folder / "view"
            own.mkdir()
            if self.case.endswith("passes"):
                link = functools.partial(os.symlink, self._mount, own / "mount")
                threading.Timer(self._seconds, link).start()
            return own / "mount" / "snapshots"
        if "error" in self.case and (mine or self._seconds > 0.5):
            _fail_reads(self._where, self._number, until)
        if self.case.startswith("no descriptors") and mine:
            soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
            back = functools.partial(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
            threading.Timer(self._seconds, back).start()
        return place

    def check(self, said: list[dict[str, Any]], before: dict[str, str]) -> None:
        """Check that the ranks and the files are as they should be."""
        for rank, one in enumerate(said):
            what = f"{self.case}: rank {rank}: {one}"
            assert one["step"] == self.expected, f"{what}, and not {self.expected}"
            assert one["touched"] == (self.expected not in (None, -1)), what
            assert one["step"] is not None or one["error"], what
            if self.expected not in (None, -1):
                assert one["weights"] == (_write_snapshots().parent / f"{self.expected}.txt").read_text(), what
        assert said[0]["error"] == said[1]["error"], said
        after = _list_files(self.place) if self.case != "nothing there" else {}
        renamed = {name: digest for name, digest in after.items() if name.startswith(".void-")}
        left = {name: digest for name, digest in after.items() if name not in renamed}
        moved = {name: digest for name, digest in before.items() if int(name[5:13]) in self.moved}
        assert left == {name: digest for name, digest in before.items() if name not in moved}, (self.case, after)
        again = {f"step-{name[6:14]}/{name.partition('/')[2]}": digest for name, digest in renamed.items()}
        assert again == moved, (self.case, after)

    def _path(self, step: int) -> Path:
        return self.place / f"step-{step:08d}"

    def _pick_file(self) -> Path:
        return self._path(STEPS[-1]) / self._chance.choice(("manifest.json", "__0_0.distcp", ".metadata"))

    def _flip(self, step: int) -> None:
        """Flip a bit of a file that has a checksum, or change a digit of the manifest's own checksum."""
        path = self._path(step) / self._chance.choice(("manifest.json", "__0_0.distcp", ".metadata"))
        content = bytearray(path.read_bytes())
        if path.name == "manifest.json":
            place = content.index(b'"sha256"', content.index(b"}}")) + 12
            content[place] = ord("0") if content[place] != ord("0") else ord("1")
        else:
            content[self._chance.randrange(len(content))] ^= 1 << self._chance.randrange(8)
        path.write_bytes(content)

    def _rewrite(self, step: int, /, **changes: Any) -> None:
        path = self._path(step) / "manifest.json"
        body = json.dumps(json.loads(path.read_bytes())["manifest"] | changes).encode()
        path.write_bytes(b'{"manifest":' + body + b',"sha256":"' + hashlib.sha256(body).hexdigest().encode() + b'"}')

    def _mount_again(self) -> None:
        self._mount.rmdir()
        (self.folder / "away").rename(self._mount)
        self.place = self._mount / "snapshots"


def _fail_reads(name: str, number: int, until: float) -> None:
    """Make reads of files and folders called `name` fail in this process with errno `number`, until a moment."""

    def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
        def failing(path: Any = ".", *arguments: Any, **more: Any) -> Any:
            if isinstance(path, str | os.PathLike) and Path(path).name == name and time.monotonic() < until:
                raise OSError(number, os.strerror(number), str(path))
            return function(path, *arguments, **more)

        return failing

    for owner, call in ((io, "open"), (builtins, "open"), (os, "stat"), (os, "lstat"), (os, "scandir")):
        setattr(owner, call, wrap(getattr(owner, call)))


def _make(generator: Any) -> tuple[Any, Any]:
    import torch

    model = torch.nn.Linear(6, 5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.rand(parameter.shape, generator=generator))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def _digest(model: Any) -> str:
    return hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()


@functools.cache
def _write_snapshots() -> Path:
    """Write the directory that trials copy, and beside it digests of the weights at each step; return its path."""

    import sentinel.hooks.session.resume  # noqa: F401
    from sentinel.hooks.snapshot import checkpoint_files

    checkpoint_files.load_torch()
    folder = Path(tempfile.mkdtemp(prefix="q"))
    os.waitpid(fork(functools.partial(_train, folder)), 0)
    assert (folder / f"{STEPS[-1]}.txt").exists()
    return folder / "snapshots"


def _train(folder: Path) -> None:
    import torch

    from bench.armed import RecordingSession
    from sentinel import wire
    from sentinel.hooks.rollback.options import Rollback
    from sentinel.hooks.rollback.restorer import Restorer

    model, optimizer = _make(torch.Generator().manual_seed(1))
    session = RecordingSession()
    terms = Rollback(every=4, keep=2, margin=1, directory=folder / "snapshots", disk_keep=3)
    restorer = Restorer(terms, models=[model], optimizers=[optimizer], session=session)
    for seq in range(STEPS[-1] + 3):
        optimizer.zero_grad()
        model(torch.randn(4, 6)).square().mean().backward()
        restorer.enter_step(seq)
        optimizer.step()
        restorer.exit_step(seq, skipped=False)
        if seq in STEPS:
            (folder / f"{seq}.txt").write_text(_digest(model))
        if (step := seq - 2) in STEPS:
            restorer.receive(wire.Publish(id=seq, seq=step, step=step, run="proof", run_id="proof", attempt=0))
            while not any(isinstance(one, wire.Published) and one.id == seq for one in session.sent):
                time.sleep(0.01)
    restorer.close()
    assert all(one.ok for one in session.sent if isinstance(one, wire.Published)), session.sent


def _list_files(place: Path) -> dict[str, str]:
    """Return relative path -> digest of all files in a directory."""
    if not place.exists():
        return {}
    found = {path: path.read_bytes() for path in sorted(place.rglob("*")) if path.is_file()}
    return {str(path.relative_to(place)): hashlib.sha256(content).hexdigest() for path, content in found.items()}
