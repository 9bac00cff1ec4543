"""What a restore changes and what it leaves, what it refuses, and what follows it."""

from __future__ import annotations

import copy
import logging
import os
import signal
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bench.armed import RecordingSession
from sentinel import wire
from sentinel.errors import EXIT_STOPPED, RunStopped
from sentinel.hooks.loop.batches import Batches
from sentinel.hooks.loop.step_accumulator import StepAccumulator
from sentinel.hooks.rollback.agreement import TwoPhaseCommit
from sentinel.hooks.rollback.lr_scaling import LearningRates
from sentinel.hooks.rollback.options import Rollback
from sentinel.hooks.rollback.restorer import Restorer
from sentinel.hooks.snapshot.capture import Cell
from tests.rollback.training import OPTIMIZERS, Training, assert_same, batches, note_cells, of_type, roll_back

DATA = batches(24)


def run(training: Training, restorer: Restorer, *, at: int = 7, to: int = 5, end: int = 10, **terms: Any) -> None:
    for seq in range(end):
        if seq == at:
            roll_back(restorer, at=at, to=to, **terms)
        training.step(DATA[seq])


def addresses(training: Training) -> list[int]:
    tensors = [*training.model.parameters(), *training.model.buffers()]
    tensors += [value for state in training.optimizer.state.values() for value in state.values()]
    tensors += [parameter.grad for parameter in training.model.parameters()]
    tensors += [value for group in training.optimizer.param_groups for value in group.values()]
    return [tensor.data_ptr() for tensor in tensors if isinstance(tensor, torch.Tensor)]


@pytest.mark.parametrize("optimizer", [name for name in OPTIMIZERS if name != "lbfgs"])
def test_everything_keeps_its_place_in_memory(optimizer: str) -> None:
    training = Training(optimizer, zero="accumulate")
    restorer, sent = training.arm()
    seen: list[list[int]] = []
    exit_step = training.on_exit

    def around(seq: int, skipped: bool) -> None:
        seen.append(addresses(training))
        exit_step(seq, skipped)
        seen.append(addresses(training))

    training.on_exit = around
    run(training, restorer, end=8)
    assert of_type(sent, wire.RolledBack)[0].ok
    assert seen[-1] == seen[-2]


@pytest.mark.slow
def test_a_compiled_model_is_not_compiled_again() -> None:
    from torch._dynamo.testing import CompileCounter  # the import takes two seconds

    training = Training("adamw", zero="end")
    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = torch.compile(training.model, backend=counter)
    restorer, sent = training.arm()
    for seq in range(12):
        if seq == 7:
            roll_back(restorer, at=7, to=5)
        compiled(DATA[seq]).square().mean().backward()
        training.optimizer.step()
        training.optimizer.zero_grad()
    assert of_type(sent, wire.RolledBack)[0].ok
    assert counter.frame_count == 1


def test_optimizer_state_that_came_or_went_since() -> None:
    training = Training("adamw")
    restorer, sent = training.arm()
    kept = {}
    exit_step = training.on_exit

    def meddle(seq: int, skipped: bool) -> None:
        if seq == 5:
            kept.update(copy.deepcopy(training.optimizer.state_dict()))
        if seq == 6:
            first, second, *_ = training.model.parameters()
            training.optimizer.state[first]["new"] = torch.ones(3)
            del training.optimizer.state[second]
            training.optimizer.param_groups[0]["new"] = 1
            training.optimizer.state[nn.Parameter(torch.ones(2))] = {"step": torch.ones(1)}
        exit_step(seq, skipped)
        if seq == 7:
            assert_same(training.optimizer.state_dict(), kept)

    training.on_exit = meddle
    run(training, restorer, end=12)
    assert of_type(sent, wire.RolledBack)[0].ok


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_a_snapshot_from_before_there_was_any_optimizer_state() -> None:
    """Runs in fp16 begin with steps that the scaler withholds."""
    training = Training("adamw", amp=True)
    overflow = training.model[0].weight.register_hook(lambda gradient: gradient * torch.inf)
    restorer, sent = training.arm()
    for seq in range(9):
        if seq == 1:
            overflow.remove()
        if seq == 6:
            roll_back(restorer, at=6, to=0)
        training.step(DATA[seq])
        if seq == 0:
            assert not training.optimizer.state
    assert of_type(sent, wire.RolledBack)[0].ok
    assert {int(state["step"]) for state in training.optimizer.state.values()} == {2}


def test_groups_that_were_added_since_stay() -> None:
    """The loop has unfrozen these parameters, and will not do so a second time."""
    training = Training("sgd nesterov", schedule="lambda")
    extra = nn.Parameter(torch.ones(3))
    training.model[0].register_parameter("extra", extra)
    restorer, sent = training.arm()
    for seq in range(8):
        if seq == 6:
            training.optimizer.add_param_group({"params": [extra], "lr": 0.5})
            training.schedule = torch.optim.lr_scheduler.LambdaLR(training.optimizer, lambda step: 1.0)
        if seq == 7:
            roll_back(restorer, at=7, to=5)
        training.step(DATA[seq])
    assert of_type(sent, wire.RolledBack)[0].ok
    assert [group["params"] for group in training.optimizer.param_groups][1] == [extra]


def test_buffers_that_the_forward_pass_makes_again() -> None:
    training = Training()
    training.model.register_buffer("cache", torch.arange(3.0))
    training.model.register_buffer("shared", torch.arange(3.0).expand(4, 3))
    restorer, sent = training.arm()
    for seq in range(8):
        if seq == 7:
            training.model.cache = torch.zeros(9)
            roll_back(restorer, at=7, to=5)
        training.step(DATA[seq])
    assert of_type(sent, wire.RolledBack)[0].ok
    assert torch.equal(training.model.cache, torch.arange(3.0))


@pytest.mark.parametrize("scaler", [None, "ready", "unscaled"])
def test_a_second_optimizer_that_steps_after_the_restore(scaler: str | None) -> None:
    """In the same iteration the second optimizer has gradients of the undone step, and must not apply them."""
    model = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
    first, second = (torch.optim.SGD(module.parameters(), lr=1.0) for module in model)
    scale = torch.amp.GradScaler("cpu", init_scale=4.0) if scaler else None
    sent: list[Any] = []
    restorer = Restorer(
        Rollback(every=1, margin=0),
        models=[model],
        optimizers=[first, second],
        scaler=scale,
        session=RecordingSession(sent=sent),
    )
    for seq in range(3):
        loss = model[1](model[0](torch.ones(1, 3))).sum() * (torch.nan if seq == 2 else 1.0)
        (scale.scale(loss) if scale else loss).backward()
        if seq == 2:
            roll_back(restorer, at=2, to=0)
        if scale and scaler == "unscaled" and seq == 2:
            scale.unscale_(second)
        if seq < 2 or scale is None:
            restorer.enter_step(seq)
        scale.step(first) if scale else first.step()
        restorer.exit_step(seq, skipped=scale is not None and seq == 2)
        before = copy.deepcopy(model[1].state_dict())
        scale.step(second) if scale else second.step()
        if scale:
            scale.update()
        if seq == 2:
            assert_same(dict(model[1].state_dict()), dict(before))
            assert all(parameter.grad is not None and not parameter.grad.any() for parameter in model.parameters())
            assert scale is None or scale.get_scale() == 4.0
    assert of_type(sent, wire.RolledBack)[0].ok
    assert restorer.ring.overlap  # its steps, between two of the first one's, tore no snapshot


# A rollback is refused, and nothing is touched.


def refused(training: Training, restorer: Restorer, sent: list[Any], spoil: Any) -> str:
    """Return the reason of the refusal, after a check that a refused rollback leaves everything as it was."""
    states = []
    exit_step = training.on_exit

    def around(seq: int, skipped: bool) -> None:
        if seq == 7:
            spoil()
        states.append(training.state())
        exit_step(seq, skipped)
        states.append(training.state())

    training.on_exit = around
    run(training, restorer, end=8)
    (answer,) = of_type(sent, wire.RolledBack)
    assert not answer.ok
    assert answer.void == ()
    assert_same(states[-1], states[-2])
    return str(answer.reason)


@pytest.mark.parametrize("name", ["0.weight", "1.running_var"])
def test_a_snapshot_with_a_flipped_bit(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training()
    restorer, sent = training.arm()
    cells = note_cells(monkeypatch)

    def flip() -> None:
        snapshot = restorer.ring.find(5)
        assert snapshot is not None
        snapshot.wait()  # or the thread might compute the checksum of the flipped bit
        kept = [cell.kept for cell in cells if cell.name == name]
        kept[-1].view(torch.int32).flatten()[5] ^= 1 << 8

    assert "snapshot of step 5 is not what was written" in refused(training, restorer, sent, flip)


@pytest.mark.parametrize(
    ("poison", "name"),
    [
        (lambda t: t.model[4].bias.data[2:3].fill_(torch.nan), "4.bias"),
        (lambda t: t.model[1].running_var[0:1].fill_(torch.inf), "1.running_var"),
        (lambda t: next(iter(t.optimizer.state.values()))["exp_avg"][0, 0].fill_(-torch.inf), "exp_avg"),
    ],
)
def test_a_snapshot_that_is_not_finite(poison: Any, name: str) -> None:
    training = Training()
    restorer, sent = training.arm()
    exit_step = training.on_exit

    def poisoned_exit(seq: int, skipped: bool) -> None:
        if seq == 5:
            poison(training)
        exit_step(seq, skipped)

    training.on_exit = poisoned_exit
    reason = refused(training, restorer, sent, lambda: None)
    assert reason.startswith("the snapshot of step 5 is not finite")
    assert name in reason


def test_a_model_that_has_changed() -> None:
    training = Training()
    restorer, sent = training.arm()

    def grow() -> None:
        training.model.append(nn.Linear(16, 2))

    reason = refused(training, restorer, sent, grow)
    assert reason == "the model has changed since the snapshot: 6.weight is new"


def test_a_state_that_would_not_load() -> None:
    training = Training()
    restorer, sent = training.arm()

    def break_it() -> None:
        training.ema.load_state_dict = lambda state: 1 / 0  # type: ignore[assignment,return-value]

    reason = refused(training, restorer, sent, break_it)
    assert "state['ema'] could not be loaded: ZeroDivisionError" in reason


# What follows a restore.


@pytest.mark.parametrize("schedule", ["cosine", "lambda"])
@pytest.mark.parametrize("optimizer", ["adamw", "tensor lr", "tensor lr of two groups", "sgd nesterov"])
def test_learning_rates_are_lowered_for_the_step_and_no_schedule_sees_it(optimizer: str, schedule: str) -> None:
    training = Training(optimizer, schedule=schedule)
    restorer, sent = training.arm()
    in_step: list[float] = []
    training.optimizer.register_step_pre_hook(
        lambda *_: in_step.append(float(training.optimizer.param_groups[0]["lr"]))
    )
    outside: list[float] = []
    for seq in range(20):
        if seq in (7, 14):
            roll_back(restorer, at=seq, to=5, lr_factor=0.5)
        outside.append(float(training.optimizer.param_groups[0]["lr"]))
        training.step(DATA[seq])
    assert [answer.ok for answer in of_type(sent, wire.RolledBack)] == [True, True]
    factors = [used / planned for used, planned in zip(in_step, outside, strict=True)]
    assert factors == pytest.approx([1.0] * 8 + [0.5] * 7 + [0.25] * 5)
    # The schedule goes on from its state after step 5.
    assert outside[8:10] == outside[6:8]


def test_learning_rates_of_a_second_optimizer_and_after_close() -> None:
    model = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
    first, second = (torch.optim.SGD(module.parameters(), lr=1.0) for module in model)
    sent: list[Any] = []
    restorer = Restorer(
        Rollback(every=1, margin=0), models=[model], optimizers=[first, second], session=RecordingSession(sent=sent)
    )
    rates: list[float] = []
    seq = 0

    def iterate() -> None:
        restorer.enter_step(seq)
        first.step()
        restorer.exit_step(seq, skipped=False)
        second.step()

    for seq in range(4):
        if seq == 2:
            roll_back(restorer, at=2, to=0, lr_factor=0.25)
        if seq == 3:
            second.register_step_pre_hook(lambda *_: rates.append(second.param_groups[0]["lr"]))
        iterate()
    assert rates == [0.25]
    restorer.close()
    second.step()
    assert rates == [0.25, 1.0]
    assert restorer.held == ()


@pytest.mark.parametrize("alone", [0, 1])
def test_an_optimizer_that_finds_its_own_rate(alone: int) -> None:
    """As in some variants of Adafactor, there is no rate to lower, and the answer says so; the other's is lowered."""

    class Own(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            assert self.param_groups[0]["lr"] is None

    model = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
    kinds = [torch.optim.SGD, torch.optim.SGD]
    kinds[alone] = Own
    optimizers = [kind(module.parameters(), lr=1.0) for kind, module in zip(kinds, model, strict=True)]
    optimizers[alone].param_groups[0]["lr"] = None
    sent: list[Any] = []
    restorer = Restorer(
        Rollback(every=1, margin=0), models=[model], optimizers=optimizers, session=RecordingSession(sent=sent)
    )
    rates: list[float] = []
    for seq in range(4):
        if seq == 2:
            roll_back(restorer, at=2, to=0, lr_factor=0.25)
        restorer.enter_step(seq)
        rates.append(optimizers[0].param_groups[0]["lr"])
        optimizers[0].step()
        restorer.exit_step(seq, skipped=False)
        optimizers[1].step()
    (done,) = of_type(sent, wire.RolledBack)
    assert (done.ok, done.reason) == (True, "lr_factor=0.25: Own has no rate to lower")
    assert rates == ([None] * 4 if alone == 0 else [1.0, 1.0, 1.0, 0.25])
    assert [group["lr"] for one in optimizers for group in one.param_groups] == ([None, 1.0], [1.0, None])[alone]
    assert restorer.held
    restorer.close()


def test_a_step_that_raised_does_not_leave_the_rate_lowered_twice() -> None:
    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    rates = LearningRates(optimizer)
    rates.lower(0.5)  # and the step raises, so that `put_back` is not called
    rates.lower(0.5)
    assert optimizer.param_groups[0]["lr"] == 0.5
    rates.put_back()
    assert optimizer.param_groups[0]["lr"] == 1.0


def test_batches_are_skipped_after_the_restore() -> None:
    class Skipping:
        skipped: list[int] = []

        def skip(self, count: int) -> str:
            self.skipped.append(count)
            return ""

    training = Training()
    restorer, sent = training.arm(batches=Skipping())
    run(training, restorer, skip_batches=3)
    assert Skipping.skipped == [3]
    assert of_type(sent, wire.RolledBack)[0].reason == ""


def test_batches_that_cannot_be_skipped_are_reported() -> None:
    training = Training()
    restorer, sent = training.arm(batches=Batches(StepAccumulator()))
    run(training, restorer, skip_batches=3)
    (answer,) = of_type(sent, wire.RolledBack)
    assert answer.ok
    assert "no batch is skipped: pass attach(loader=...)" in answer.reason


def test_stop_ends_the_run_at_the_exit_of_the_next_step(capsys: pytest.CaptureFixture[str]) -> None:
    training = Training()
    restorer, _ = training.arm()
    training.step(DATA[0])
    restorer.receive(wire.Stop(reason="the same loss spike for the fourth time"))
    weights = training.state()["parameters"]
    with pytest.raises(RunStopped) as stop:
        training.step(DATA[1])
    assert stop.value.code == EXIT_STOPPED
    assert stop.value.reason == "the same loss spike for the fourth time"
    assert "stopped at step 1: the same loss spike for the fourth time" in capsys.readouterr().err
    assert not torch.equal(training.state()["parameters"][0], weights[0])


def test_a_fault_of_sentinel_never_reaches_the_loop(caplog: pytest.LogCaptureFixture, monkeypatch: Any) -> None:
    training = Training()
    restorer, sent = training.arm()

    def broken(*_: object) -> None:
        raise ValueError("broken")

    monkeypatch.setattr("sentinel.hooks.snapshot.snapshot.Snapshot.copy", broken)
    with caplog.at_level(logging.WARNING):
        run(training, restorer, end=9)
    (record,) = caplog.records
    assert "rollback is disarmed, training goes on: a snapshot could not be copied: broken" in record.message
    (refusal,) = of_type(sent, wire.Prepared)
    assert not refusal.ok
    assert "could not be copied: broken" in refusal.reason
    assert not of_type(sent, wire.RolledBack)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_waits_for_the_end_of_a_restore(number: signal.Signals, monkeypatch: pytest.MonkeyPatch) -> None:
    """A handler may save a checkpoint, which must not hold half a restore."""
    training = Training()
    restorer, _ = training.arm()
    before: Any = signal.signal(number, signal.default_int_handler)
    original = training.ema.load_state_dict

    def load(state: Any) -> None:
        os.kill(os.getpid(), number)
        original(state)

    monkeypatch.setattr(training.ema, "load_state_dict", load)
    weights, exit_step = {}, training.on_exit

    def around(seq: int, skipped: bool) -> None:
        exit_step(seq, skipped)
        weights[seq] = copy.deepcopy(training.model.state_dict())

    training.on_exit = around
    try:
        with pytest.raises(KeyboardInterrupt):
            run(training, restorer, end=8)
        assert signal.getsignal(number) is signal.default_int_handler
    finally:
        signal.signal(number, before)
    assert 7 not in weights
    assert_same(training.model.state_dict(), weights[5])


@pytest.mark.parametrize("where", ["wait", "reach_step"])
def test_an_interrupt_at_the_promised_step_breaks_the_promise(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A promise that stayed open would bind the rank: no more snapshots, and the daemon would wait for its answer."""
    training = Training()
    restorer, sent = training.arm()

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    for seq in range(7):
        training.step(DATA[seq])
    restorer.receive(wire.Prepare(id=1, at=7, to=5))
    with monkeypatch.context() as interrupted:
        interrupted.setattr(TwoPhaseCommit, where, interrupt)
        with pytest.raises(KeyboardInterrupt):
            training.step(DATA[7])
    for seq in range(8, 11):
        training.step(DATA[seq])
    (answer,) = of_type(sent, wire.RolledBack)
    assert not answer.ok
    assert "interrupted" in answer.reason
    assert restorer.promised == 0


def test_state_that_was_loaded_is_put_back_where_other_state_cannot_be_loaded() -> None:
    """All or nothing: an average that went back while the weights did not would belong to another run."""

    class Broken:
        calls = 0

        def state_dict(self) -> dict[str, int]:
            return {}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.calls += 1
            if self.calls == 1:
                raise ValueError("broken")

    training = Training()
    restorer, sent = training.arm(
        Rollback(every=5, keep=2, margin=5, state={"ema": training.ema, "later": Broken()}), disarm=sent_nowhere
    )
    for seq in range(7):
        training.step(DATA[seq])
    before: dict[str, Any] = {}
    exit_step = training.on_exit

    def around(seq: int, skipped: bool) -> None:
        before.update(training.state())
        exit_step(seq, skipped)
        assert_same(training.state(), before)

    training.on_exit = around
    roll_back(restorer, at=7, to=5)
    training.step(DATA[7])
    (answer,) = of_type(sent, wire.RolledBack)
    assert (answer.ok, answer.touched) == (False, False)
    assert "state['later'] could not be loaded: ValueError('broken')" in answer.reason


def test_a_restore_is_undone_where_there_is_no_memory_for_new_tensors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Optimizer state that is gone gets new tensors, on a GPU that is nearly full."""
    training = Training()
    restorer, sent = training.arm(disarm=sent_nowhere)
    for seq in range(7):
        training.step(DATA[seq])
    before: dict[str, Any] = {}
    exit_step = training.on_exit
    make, made = Cell.make_live_tensor, list[str]()

    def make_two(cell: Cell) -> Tensor:
        if cell.name.startswith("optimizers"):
            made.append(cell.name)
            if len(made) > 2:
                raise torch.OutOfMemoryError("CUDA out of memory")
        return make(cell)

    def around(seq: int, skipped: bool) -> None:
        for state in training.optimizer.state.values():
            del state["exp_avg_sq"]
        before.update(training.state())
        exit_step(seq, skipped)
        assert_same(training.state(), before)

    monkeypatch.setattr(Cell, "make_live_tensor", make_two)
    training.on_exit = around
    roll_back(restorer, at=7, to=5)
    training.step(DATA[7])
    (answer,) = of_type(sent, wire.RolledBack)
    assert (answer.ok, answer.touched) == (False, False)
    assert "could not be put back: OutOfMemoryError" in answer.reason


def sent_nowhere(reason: str) -> None:
    pytest.fail(f"disarmed: {reason}")
