"""Which snapshots the ring keeps, and what happens to a torn one."""

from __future__ import annotations

import copy
import logging
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sentinel import wire
from sentinel.hooks.rollback.options import Rollback
from sentinel.hooks.snapshot import snapshot
from sentinel.hooks.snapshot.host_buffer import HostBuffer
from sentinel.hooks.snapshot.snapshot import Ring, Snapshot
from sentinel.hooks.snapshot.training_state import Weights
from tests.rollback.training import Parts, Training, batches, note_cells, of_type, poisoned, roll_back

DATA = batches(24)


@pytest.mark.slow
@given(
    every=st.integers(1, 6),
    keep=st.integers(2, 4),
    fraction=st.floats(0, 1),
    events=st.lists(st.sampled_from(["healthy"] * 8 + ["late", "suspicious", "rolled back"]), max_size=80),
)
@settings(max_examples=200, deadline=None)
def test_the_newest_good_one_is_never_given_up(every: int, keep: int, fraction: float, events: list[str]) -> None:
    """The newest good snapshot is kept whatever others are missed, taken a step late (torn), or voided."""
    margin = int(fraction * every * (keep - 1))
    ring = Ring(Parts(), keep=keep, margin=margin, afford=lambda nbytes: None)
    ring.overlap = False
    late = False
    for seq, event in enumerate(["healthy", *events]):
        good = max((held for held in ring.held if held <= seq - margin), default=None)
        if event == "rolled back" and good is not None:
            ring.void_after(good)
        elif event == "late" and seq % every == 0:
            late = True
        elif (seq % every == 0 or late) and event != "suspicious":
            ring.make_room(seq)
            ring.begin(seq)
            late = False
        assert good is None or good in ring.held
        assert len(ring.held) <= keep
        assert list(ring.held) == sorted(set(ring.held))


def test_ranks_that_took_different_snapshots_keep_one_in_common() -> None:
    """The first rank took none at step 8, since its own loss looked odd then."""
    rings = [Ring(Parts(), keep=2, margin=4, afford=lambda nbytes: None) for _ in range(2)]
    for ring in rings:
        ring.overlap = False
    for seq in range(0, 40, 4):
        for number, ring in enumerate(rings):
            if not (number == 0 and seq in (8, 20, 32)):
                ring.make_room(seq)
                ring.begin(seq)
        for common in set(rings[0].held) & set(rings[1].held):
            for ring in rings:
                ring.shared.add(common)
        assert seq < 4 or any(held <= seq - 4 for held in set(rings[0].held) & set(rings[1].held)), seq
        assert all(ring.shared <= set(ring.held) for ring in rings), "a snapshot that is given up is forgotten"


def test_a_late_snapshot_does_not_push_out_the_only_good_one() -> None:
    ring = Ring(Parts(), keep=2, margin=4, afford=lambda nbytes: None)
    ring.overlap = False
    for seq in (0, 5, 8):  # that of step 4 was torn, and taken at 5
        ring.make_room(seq)
        ring.begin(seq)
    assert ring.held == (0, 8)


def test_which_snapshots_a_healthy_run_holds() -> None:
    training = Training()
    restorer, sent = training.arm(Rollback(every=4, keep=2, margin=4))
    held = []
    for batch in DATA[:14]:
        training.step(batch)
        held.append(restorer.held)
    assert held[:9] == [(0,), (0,), (0,), (0,), (0, 4), (0, 4), (0, 4), (0, 4), (4, 8)]
    assert held[9:] == [(4, 8), (4, 8), (4, 8), (8, 12), (8, 12)]
    taken = of_type(sent, wire.SnapshotTaken)
    assert [(message.seq, message.void) for message in taken] == [(0, ()), (4, ()), (8, (0,)), (12, (4,))]
    # Parameters with two moments and a step counter each, buffers and the average: nothing is held twice.
    assert taken[-1].nbytes == taken[0].nbytes > 4 * 4 * sum(p.numel() for p in training.model.parameters())


def test_no_snapshot_is_taken_under_suspicion() -> None:
    """Snapshots are taken only at multiples of `every`: ranks that hear of it a step apart then have some in common."""
    training = Training()
    restorer, sent = training.arm(Rollback(every=2, keep=2, margin=2))
    for seq, batch in enumerate(DATA[:10]):
        if seq == 3:
            restorer.receive(wire.Withhold(steps=5))
        training.step(batch)
        if seq == 3:
            assert restorer.held == (0, 2)
    assert [message.seq for message in of_type(sent, wire.SnapshotTaken)] == [0, 2, 8]
    assert restorer.held == (2, 8)


def swap_with_data(training: Training) -> None:
    """Swap in EMA weights in a way that `_version` does not show."""
    for parameter, value in zip(training.model.parameters(), training.ema.shadow.values(), strict=True):
        parameter.data.copy_(value)


def clip(training: Training) -> None:
    with torch.no_grad():
        training.model[0].weight[3, 3] += 1.0


def edit_momentum(training: Training) -> None:
    for state in training.optimizer.state.values():
        state["exp_avg"].data.mul_(0.5)


@pytest.mark.parametrize("meddle", [swap_with_data, clip, edit_momentum])
def test_weights_written_to_between_steps(
    meddle: Callable[[Training], None], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is restored is the state at the exit of the step, to the bit, though the thread copies it later."""
    training = Training()
    restorer, sent = training.arm(Rollback(every=5, keep=2, margin=5))
    at_exit: dict[int, Any] = {}
    exit_step = training.on_exit
    meddled = threading.Event()
    copy_now = Snapshot.copy

    def copy_late(snapshot: Snapshot) -> None:
        if threading.current_thread() is not threading.main_thread():
            assert meddled.wait(10)
        copy_now(snapshot)

    monkeypatch.setattr(Snapshot, "beside", True)  # as on a GPU
    monkeypatch.setattr(Snapshot, "copy", copy_late)

    def recorded(seq: int, skipped: bool) -> None:
        at_exit[seq] = copy.deepcopy((training.model.state_dict(), training.optimizer.state_dict()))
        exit_step(seq, skipped)
        if seq == 13:
            at_exit[-1] = copy.deepcopy((training.model.state_dict(), training.optimizer.state_dict()))

    training.on_exit = recorded
    with caplog.at_level(logging.WARNING):
        for seq, batch in enumerate(DATA[:14]):
            if seq == 13:
                roll_back(restorer, at=13, to=5)
            training.step(poisoned(batch) if seq > 11 else batch)
            meddle(training)
            meddled.set()
    # The snapshot of 0 is torn and taken at 1 instead; then copies are made inside the step, and 5 and 10 are whole.
    assert [message.seq for message in of_type(sent, wire.SnapshotTaken)] == [1, 5, 10]
    assert [message.ok for message in of_type(sent, wire.RolledBack)] == [True]
    assert len(caplog.messages) == 1
    assert "written to between two steps" in caplog.messages[0]
    for key, value in at_exit[5][0].items():
        assert torch.equal(value, at_exit[-1][0][key]), key
    for index, state in at_exit[5][1]["state"].items():
        for key, value in state.items():
            assert torch.equal(value, at_exit[-1][1]["state"][index][key]), key


def test_the_step_waits_for_the_copy_and_not_for_its_checksum(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Snapshot, "beside", True)  # as on a GPU
    cells = note_cells(monkeypatch)
    ring = Ring(Parts(Weights([torch.nn.Linear(2, 2)], [])), keep=2, margin=0, afford=lambda nbytes: None)
    settled = threading.Event()
    checksum = HostBuffer.checksum

    def late(arena: HostBuffer) -> int:
        assert settled.wait(60)
        return checksum(arena)

    monkeypatch.setattr(HostBuffer, "checksum", late)
    ring.make_room(0)
    ring.begin(0)
    complete, torn = ring.settle()
    assert complete is not None
    assert not torn
    settled.set()
    assert complete.flaw() == ""
    cells[0].kept.add_(1)
    assert "its checksum has changed" in complete.flaw()


def test_two_threads_may_wait_for_a_checksum(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that writes a snapshot to disk waits for it, and so does the loop that restores it."""
    monkeypatch.setattr(Snapshot, "beside", True)  # as on a GPU
    ring = Ring(Parts(Weights([torch.nn.Linear(2, 2)], [])), keep=2, margin=0, afford=lambda nbytes: None)
    first, both = threading.Event(), threading.Event()
    checksum = HostBuffer.checksum
    monkeypatch.setattr(HostBuffer, "checksum", lambda arena: checksum(arena) if both.wait(60) else 0)
    ring.make_room(0)
    ring.begin(0)
    complete, _ = ring.settle()
    assert complete is not None
    assert complete.sealing is not None
    wait = complete.sealing.wait

    def noted() -> bool:
        (both if first.is_set() else first).set()
        return wait()

    monkeypatch.setattr(complete.sealing, "wait", noted)
    flaws: list[str] = []
    writer = threading.Thread(target=lambda: flaws.append(complete.flaw()))
    writer.start()
    assert first.wait(60)
    flaws.append(complete.flaw())
    both.set()
    writer.join()
    assert flaws == ["", ""]


ROOT = Path(__file__).parents[2]
ENDS = """
import torch
from sentinel.hooks.snapshot.snapshot import Ring
from sentinel.hooks.snapshot.host_buffer import HostBuffer
from sentinel.hooks.snapshot.training_state import Weights
from tests.rollback.training import Parts

much = torch.zeros(20_000_000)
HostBuffer.checksum = lambda buffer: sum(int(much.sum()) for _ in range(50))
ring = Ring(Parts(Weights([torch.nn.Linear(2, 2)], [])), keep=2, margin=0, afford=lambda nbytes: None)
ring.begin(0)
ring.settle()
"""


@pytest.mark.slow
def test_a_process_may_end_while_a_checksum_is_made() -> None:
    """The ring need not be closed: a thread that returned from torch after the interpreter's end would abort it."""
    done = subprocess.run([sys.executable, "-c", ENDS], capture_output=True, text=True, timeout=100, cwd=ROOT)
    assert (done.returncode, done.stderr) == (0, "")


def test_all_memory_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Snapshot, "beside", True)  # as on a GPU
    ring = Ring(Parts(Weights([torch.nn.Linear(2, 2)], [])), keep=2, margin=0, afford=lambda nbytes: None)
    held: list[weakref.ref[Snapshot]] = []
    alive: list[bool] = []
    monkeypatch.setattr(snapshot, "give_back", lambda: alive.extend(ref() is not None for ref in held))
    for seq in range(2):
        ring.make_room(seq)
        ring.begin(seq)
        held.append(weakref.ref(ring.settle()[0]))  # type: ignore[arg-type]
    assert len({ref() for ref in held}) == 2
    ring.close()
    assert alive == [False, False]


def test_a_snapshot_without_a_checksum_has_a_flaw(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Snapshot, "beside", True)  # as on a GPU
    ring = Ring(Parts(Weights([torch.nn.Linear(2, 2)], [])), keep=2, margin=0, afford=lambda nbytes: None)

    def fail(arena: HostBuffer) -> int:
        raise MemoryError

    with monkeypatch.context() as failing:
        failing.setattr(HostBuffer, "checksum", fail)
        ring.make_room(3)
        ring.begin(3)
        complete, _ = ring.settle()
        assert complete is not None
        complete.wait()
    assert complete.flaw() == "the snapshot of step 3 has no checksum: making it failed"


def test_an_interrupt_does_not_use_up_the_memory_of_snapshots(monkeypatch: pytest.MonkeyPatch) -> None:
    """The user's loop may catch the interrupt and go on; without this, two of them would end all snapshots silently."""
    monkeypatch.setattr(Snapshot, "beside", True)  # as on a GPU
    model = torch.nn.Linear(2, 2)
    ring = Ring(Parts(Weights([model], [])), keep=2, margin=0, afford=lambda nbytes: None)
    for seq in range(4):
        with monkeypatch.context() as interrupted:
            interrupted.setattr(Snapshot, "write_detector" if seq % 2 else "take", _interrupt)
            ring.make_room(seq)
            with pytest.raises(KeyboardInterrupt):
                ring.begin(seq)
    for seq in range(4, 8):
        ring.make_room(seq)
        ring.begin(seq)
        ring.settle()
    assert ring.held == (6, 7)


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt
