"""Snapshots on disk: a restarted process gets the state back to the bit."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import sentinel
from bench.armed import RecordingSession
from sentinel import wire
from sentinel.errors import AttachError, RollbackError
from sentinel.hooks.rollback.framework_checkpoints import BEFORE
from sentinel.hooks.rollback.options import Rollback
from sentinel.hooks.rollback.restorer import Restorer
from sentinel.hooks.snapshot import directory as snapshots
from sentinel.hooks.snapshot.snapshot import Ring
from tests.rollback.training import OPTIMIZERS, Training, assert_same, batches, of_type, roll_back, wait_for_disk

DATA = batches(24)
NO_SCALER = torch.amp.GradScaler("cpu", enabled=False)
"""A scaler that is passed explicitly, so that `resume` does not find one of another test."""


def armed(training: Training, directory: Path, *, step: int = 0, **more: Any) -> tuple[Restorer, list[Any]]:
    terms = Rollback(every=5, keep=2, margin=5, state={"ema": training.ema}, directory=directory, **more)
    return training.arm(terms, step=step)


def write(restorer: Restorer, sent: list[Any], seq: int, *, step: int | None = None) -> wire.Published:
    """Order the snapshot to be written, as the daemon does, and wait for it."""
    restorer.receive(
        wire.Publish(id=seq + 1, seq=seq, step=seq if step is None else step, run="train", run_id="train-1", attempt=0)
    )
    wait_for_disk(restorer)
    return of_type(sent, wire.Published)[-1]  # type: ignore[no-any-return]


def write_two(directory: Path, training: Training | None = None) -> None:
    """Train, and write snapshots of steps 5 and 10."""
    training = training or Training()
    restorer, sent = armed(training, directory)
    for seq in range(12):
        training.step(DATA[seq])
        if seq in (6, 11):
            assert write(restorer, sent, seq - 1).ok
    restorer.close()


def again(training: Training, directory: Path, **more: Any) -> int:
    return sentinel.resume(
        training.model, training.optimizer, scaler=training.scaler or NO_SCALER, scheduler=training.schedule,
        state={"ema": training.ema}, directory=directory, **more,
    )  # fmt: skip


def written(directory: Path, optimizer: str = "adamw", *, steps: int = 12, amp: bool = False) -> Training:
    """Train for some steps with the snapshot of step 5 written to disk, and return the training."""
    training = Training(optimizer, amp=amp)
    restorer, sent = armed(training, directory)
    for seq in range(steps):
        training.step(DATA[seq])
        if seq == 7:
            answer = write(restorer, sent, 5)
            assert answer.ok, answer.reason
    restorer.close()
    return training


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("optimizer", "amp"), [*((name, False) for name in OPTIMIZERS), ("adamw", True)])
def test_a_resumed_run_equals_one_that_never_stopped(tmp_path: Path, optimizer: str, amp: bool) -> None:
    expected = written(tmp_path / "kept", optimizer, amp=amp).state()
    other = Training(optimizer, amp=amp)
    for seq in range(3):  # so that state and generators differ
        other.step(DATA[-seq])
    assert again(other, tmp_path / "kept") == 6
    other.seq = 6
    for seq in range(6, 12):
        other.step(DATA[seq])
    assert_same(other.state(), expected)


def test_a_new_process_has_no_optimizer_state_yet(tmp_path: Path) -> None:
    expected = written(tmp_path).state()
    other = Training()
    assert again(other, tmp_path) == 6
    for seq in range(6, 12):
        other.step(DATA[seq])
    assert_same(other.state(), expected)


def test_a_rate_that_groups_share_is_still_shared(tmp_path: Path) -> None:
    """A loop that writes its schedule into that tensor reaches all groups."""
    name = "tensor lr of two groups"
    written(tmp_path, name)
    other = Training(name)
    rate = other.optimizer.param_groups[0]["lr"]
    assert again(other, tmp_path) == 6
    assert [group["lr"] is rate for group in other.optimizer.param_groups] == [True, True]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"before": "400"}, "before='400': must be the number of a step"),
        ({"state": [1]}, "a list has no names"),
        ({"state": {"ema": 3}}, "'ema': ...}): a int has no state_dict"),
    ],
)
def test_a_wrong_argument_is_refused(tmp_path: Path, given: dict[str, Any], words: str) -> None:
    training = Training()
    with pytest.raises(AttachError) as refusal:
        sentinel.resume(training.model, training.optimizer, directory=tmp_path, **given)
    assert words in str(refusal.value)


def test_state_of_another_optimizer_is_refused(tmp_path: Path) -> None:
    written(tmp_path)
    other = Training("sgd nesterov")
    before = other.state()
    with pytest.raises(RollbackError, match=r"SGD has 'dampening', and the snapshot 'amsgrad' instead"):
        again(other, tmp_path)
    assert_same(other.state(), before)


def test_an_option_that_the_snapshot_lacks_stays(tmp_path: Path) -> None:
    """A newer version of torch has more of them, and reads them in each step."""
    written(tmp_path)
    other = Training()
    other.optimizer.param_groups[0]["lately"] = True
    assert again(other, tmp_path) == 6
    assert other.optimizer.param_groups[0]["lately"]


def test_nothing_is_touched_where_there_is_no_snapshot(tmp_path: Path) -> None:
    training = Training()
    before = training.state()
    assert again(training, tmp_path / "none") == 0
    assert_same(training.state(), before)
    assert (tmp_path / "none").stat().st_mode & 0o777 == 0o700


def test_the_files_of_a_snapshot(tmp_path: Path) -> None:
    written(tmp_path)
    (snapshot,) = snapshots.list_published(tmp_path)
    assert snapshot.path.name == "step-00000005"
    assert (snapshot.step, snapshot.manifest.run, snapshot.manifest.world_size) == (5, "train", 1)
    assert sorted(snapshot.manifest.files) == [".metadata", "__0_0.distcp"]
    assert sorted(path.name for path in snapshot.path.iterdir()) == [".metadata", "__0_0.distcp", "manifest.json"]
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000005"]
    assert snapshot.flaw() == ""


def test_only_the_bytes_of_the_tensors_are_written(tmp_path: Path) -> None:
    """A tensor in the arena is a view of the whole arena; only the tensor's own bytes are written."""
    model = nn.Linear(512, 512)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sent: list[Any] = []
    restorer = Restorer(
        Rollback(every=1, keep=2, margin=1, directory=tmp_path),
        models=[model],
        optimizers=[optimizer],
        session=RecordingSession(sent=sent),
    )
    restorer.enter_step(0)
    restorer.exit_step(0, skipped=False)
    restorer.enter_step(1)
    assert 512 * 513 * 4 <= write(restorer, sent, 0).nbytes < 1.1 * 512 * 513 * 4
    restorer.close()


def test_the_newest_snapshots_on_disk_are_kept(tmp_path: Path) -> None:
    training = Training()
    restorer, sent = armed(training, tmp_path, disk_keep=2)
    for seq in range(17):
        training.step(DATA[seq])
        if seq in (6, 11, 16):
            assert write(restorer, sent, seq - 1).ok
    assert snapshots.steps(tmp_path) == [10, 15]
    assert again(Training(), tmp_path) == 16
    assert again(Training(), tmp_path, before=15) == 11


def test_an_older_snapshot_is_taken_where_the_newest_led_to_the_same_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = Training()
    restorer, sent = armed(training, tmp_path)
    for seq in range(12):
        training.step(DATA[seq])
        if seq in (6, 11):
            assert write(restorer, sent, seq - 1).ok
    monkeypatch.setenv(BEFORE, "10")
    assert again(Training(), tmp_path) == 6
    assert snapshots.steps(tmp_path) == [5]  # a younger snapshot belongs to steps that were undone
    monkeypatch.setenv(BEFORE, "ten")
    with pytest.raises(AttachError, match="SENTINEL_RESUME_BEFORE=ten"):
        again(Training(), tmp_path)


def test_a_rollback_takes_back_what_is_younger(tmp_path: Path) -> None:
    training = Training()
    restorer, sent = armed(training, tmp_path, step=100)
    for seq in range(12):
        training.step(DATA[seq])
        if seq in (6, 11):
            assert write(restorer, sent, seq - 1, step=99 + seq).ok
    assert snapshots.steps(tmp_path) == [105, 110]
    roll_back(restorer, at=12, to=5)
    training.step(DATA[12])
    assert of_type(sent, wire.RolledBack)[-1].ok
    assert snapshots.steps(tmp_path) == [105]


def test_a_snapshot_that_is_being_written_is_not_overwritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second order is refused while a snapshot is written, and the ring holds that snapshot until it is on disk."""
    from sentinel.hooks.snapshot import checkpoint_files

    gate, entered = threading.Event(), threading.Event()
    assemble = checkpoint_files.assemble

    def slowly(*arguments: Any) -> Any:
        entered.set()
        assert gate.wait(30)
        return assemble(*arguments)

    monkeypatch.setattr(checkpoint_files, "assemble", slowly)
    training = Training()
    restorer, sent = armed(training, tmp_path)
    for seq in range(7):
        training.step(DATA[seq])
    restorer.receive(wire.Publish(id=1, seq=5, step=5, run="train", run_id="r", attempt=0))
    assert entered.wait(30)
    restorer.receive(wire.Publish(id=2, seq=0, step=0, run="train", run_id="r", attempt=0))
    assert not of_type(sent, wire.Published)[-1].ok  # one snapshot at a time
    for seq in range(7, 17):
        training.step(DATA[seq])
        assert 5 in restorer.held
    roll_back(restorer, at=17, to=0 if 0 in restorer.held else 5)
    gate.set()
    write(restorer, sent, 99)
    training.step(DATA[17])
    restorer.close()


def test_a_snapshot_is_not_dropped_while_the_disk_thread_gives_it_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dropped between two lines of `unpin`, it would be free twice, and hold two steps at once."""
    unpin, void_after = Ring.unpin, Ring.void_after
    entered, dropped, over = threading.Event(), threading.Event(), threading.Event()
    order: list[str] = []

    def unpin_slowly(ring: Ring) -> None:
        entered.set()
        dropped.wait(0.5)  # the training thread is at its rollback: it must wait
        unpin(ring)
        order.append("given back")
        over.set()

    def drop(ring: Ring, seq: int) -> tuple[int, ...]:
        order.append("dropped")
        dropped.set()
        return void_after(ring, seq)

    monkeypatch.setattr(Ring, "unpin", unpin_slowly)
    monkeypatch.setattr(Ring, "void_after", drop)
    training = Training()
    restorer, _ = armed(training, tmp_path)
    for seq in range(7):
        training.step(DATA[seq])
    roll_back(restorer, at=7, to=0)
    restorer.receive(wire.Publish(id=1, seq=5, step=5, run="train", run_id="r", attempt=0))
    assert entered.wait(30)
    training.step(DATA[7])
    assert over.wait(30)
    assert order == ["given back", "dropped"]
    restorer.close()


def test_a_step_that_is_still_to_come_is_refused(tmp_path: Path) -> None:
    """A run that begins at step 0 must not use the folder of another run."""
    written(tmp_path)
    training = Training()
    with pytest.raises(RollbackError, match=r"holds a snapshot of step 5, and this run begins at step 0.*resume"):
        armed(training, tmp_path)
    armed(training, tmp_path, step=again(training, tmp_path))


@pytest.mark.parametrize("change", ["model", "optimizer", "groups", "state", "more state", "scaler"])
def test_a_run_that_does_not_fit(tmp_path: Path, change: str) -> None:
    written(tmp_path)
    training, state = Training(amp=change == "scaler"), {}
    match change:
        case "model":
            training.model.append(nn.Linear(16, 1))
        case "optimizer":
            training.optimizer = torch.optim.AdamW([*training.model.parameters(), nn.Parameter(torch.ones(1))])
        case "groups":
            training.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
        case "state":
            state = {"ema": None}
        case "more state":
            state = {"sampler": training.ema}
    given = {"ema": training.ema} | state
    with pytest.raises(RollbackError):
        sentinel.resume(
            training.model, training.optimizer, scaler=training.scaler or NO_SCALER, scheduler=training.schedule,
            directory=tmp_path, state={name: value for name, value in given.items() if value is not None},
        )  # fmt: skip


def test_a_model_without_memory_is_refused(tmp_path: Path) -> None:
    """Already in the first start: copies into the meta device are lost without an error."""
    with torch.device("meta"):
        model = nn.Linear(8, 4)
    with pytest.raises(AttachError, match=r"on the meta device \(weight, bias\).*to_empty"):
        sentinel.resume(model, torch.optim.AdamW(model.parameters()), directory=tmp_path)


def test_only_a_directory_of_ones_own_is_read(tmp_path: Path) -> None:
    written(tmp_path)
    os.chmod(tmp_path, 0o777)
    with pytest.raises(RollbackError, match="chmod go-w"):
        again(Training(), tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(RollbackError, match="is no directory"):
        snapshots.directory(tmp_path / "file")
    with pytest.raises(RollbackError, match="no snapshots can be kept there"):
        snapshots.directory(tmp_path / "file" / "below", make=True)
