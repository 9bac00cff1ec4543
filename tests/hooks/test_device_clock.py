"""How much of a GPU's time Sentinel costs, on a simulated device that runs a loop's launches behind the host."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

import sentinel
from sentinel.hooks.core.device_clock import LEAST_SHARE, MOST_AWAITED, DeviceClock, make_device_clock
from sentinel.hooks.core.governor import Governor
from sentinel.hooks.step import optimizer_monitor
from tests.hooks.conftest import FakeDaemon
from tests.hooks.governed import make_governor
from tests.hooks.loops import model


class Device:
    """A device that works through what was launched, in order; times are in seconds."""

    def __init__(self) -> None:
        self.host = self.busy_until = 0.0
        self.fails = False

    def launch(self, seconds: float) -> float:
        """Launch work of some seconds, and return when it is over."""
        self.busy_until = max(self.busy_until, self.host) + seconds
        return self.busy_until

    def make_clock(self) -> DeviceClock:
        return DeviceClock(lambda: None, lambda: Event(self))


class Event:
    def __init__(self, device: Device) -> None:
        self.device, self.at = device, 0.0

    def record(self, stream: object) -> None:
        self.at = self.device.launch(0.0)

    def query(self) -> bool:
        return self.at <= self.device.host

    def elapsed_time(self, end_event: Event) -> float:
        if self.device.fails:
            raise RuntimeError("CUDA error: invalid argument")
        return 1e3 * (end_event.at - self.at)


class SimulatedLoop:
    """A step: forward and backward pass, our hooks, optimizer, and the host's work until the next. In seconds."""

    def __init__(self, device: Device, *, launching: float, work: float, optimizer: float = 0.0, loading: float = 0.0):
        self.device, self.clock = device, device.make_clock()
        self.launching, self.work, self.optimizer, self.loading = launching, work, optimizer, loading

    def step(self, *, host: float, ours: float, tier: int = 2) -> float:
        """Run a step in which our hooks take `host` and give the device `ours`; return the share on the clock."""
        device, clock = self.device, self.clock
        device.host = max(device.host, device.busy_until - 2 * self.work)  # the queue has room for two steps
        device.host += self.launching / 2
        clock.begin_backward()
        device.host += self.launching / 2
        device.launch(self.work)
        clock.begin_step()
        device.host += host
        device.launch(ours)
        clock.mark()
        device.host += self.optimizer
        clock.mark()
        clock.mark()
        share = clock.end_step(tier, host)
        device.host += self.loading
        return share


def test_a_device_that_is_behind_feels_only_what_it_has_to_do() -> None:
    loop = SimulatedLoop(Device(), launching=0.02, work=0.2)
    shares = [loop.step(host=0.02, ours=0.004) for _ in range(20)]
    assert shares[0] == 1.0, "not known yet"
    assert shares[-1] == pytest.approx(0.2)


@pytest.mark.parametrize(
    "loop",
    [{"launching": 0.01, "work": 0.047, "optimizer": 0.002, "loading": 0.05}, {"launching": 0.004, "work": 0.0001},
     {"launching": 0.01, "work": 0.02, "optimizer": 0.03}],
    ids=["a slow loader", "a small model", "a slow optimizer"],
)  # fmt: skip
def test_where_the_device_waits_for_the_host_all_of_it_is_felt(loop: dict[str, float]) -> None:
    """The device is behind while our hooks run only because the loop's own launches were right before them."""
    slow = SimulatedLoop(Device(), **loop)
    assert {slow.step(host=0.005, ours=0.0001) for _ in range(40)} == {1.0}


def test_sampled_steps_are_told_apart() -> None:
    loop = SimulatedLoop(Device(), launching=0.02, work=0.2)
    for seq in range(64):
        sampled = seq % 8 == 7
        share = loop.step(host=0.02, ours=0.008 * sampled, tier=2 * sampled)
    assert share == pytest.approx(0.4)
    assert loop.step(host=0.02, ours=0.0, tier=0) == LEAST_SHARE


def test_a_device_that_hangs_is_not_waited_for_and_events_do_not_pile_up() -> None:
    device = Device()
    clock = device.make_clock()
    made: list[Event] = []
    clock._make_event = lambda: made.append(Event(device)) or made[-1]
    device.busy_until = 1e9
    for _ in range(100):
        clock.begin_step()
        clock.mark()
        assert clock.end_step(1, 0.01) == 1.0
    assert len(made) == 2 * MOST_AWAITED


@pytest.mark.faults
def test_a_clock_that_fails_leaves_the_time_on_the_host(swallowed: list[str]) -> None:
    loop = SimulatedLoop(Device(), launching=0.02, work=0.2)
    assert [loop.step(host=0.02, ours=0.001) for _ in range(10)][-1] < 1.0
    loop.device.fails = True
    assert [loop.step(host=0.02, ours=0.001) for _ in range(10)][-1] == 1.0
    assert len(swallowed) == 1


def test_there_is_no_device_clock_on_the_host() -> None:
    assert make_device_clock(list(model().parameters())) is None
    assert make_device_clock([]) is None
    mixed = [torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(2, device="meta"))]
    assert make_device_clock(mixed) is None


class Recorder:
    """Events of a device that is always behind; what the loop and our hooks launch is noted between them."""

    def __init__(self) -> None:
        self.order: list[str] = []

    def record(self, stream: object) -> None:
        self.order.append("mark")

    def query(self) -> bool:
        return False

    def elapsed_time(self, end_event: object) -> float:
        return 0.0


def test_marks_go_around_our_work_alone(daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradients' statistics are between the first two; the optimizer's own step is between the second and third."""
    events = Recorder()
    note_norms = property(lambda self: events.order.append("norms") or 0.0)
    monkeypatch.setattr(optimizer_monitor, "make_device_clock", lambda _: DeviceClock(lambda: None, lambda: events))
    monkeypatch.setattr(optimizer_monitor.Gradients, "total", note_norms)
    net = model()

    class Noted(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            events.order.append("optimizer")

    optimizer = Noted(net.parameters(), 1e-3)
    with sentinel.attach(net, optimizer):
        for parameter in net.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
    kinds = [name for name, _ in itertools.groupby(events.order)]
    assert kinds == ["mark", "norms", "mark", "optimizer", "mark"]
    assert events.order[-2:] == ["mark", "mark"]


def test_a_first_step_that_is_withheld_leaves_the_clock_to_the_next(
    daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[DeviceClock] = []

    def make(parameters: list[torch.Tensor]) -> DeviceClock:
        made.append(DeviceClock(lambda: None, Recorder))
        return made[-1]

    monkeypatch.setattr(optimizer_monitor, "make_device_clock", make)
    net = model()
    optimizer, scaler = torch.optim.SGD(net.parameters(), 1e-3), torch.amp.GradScaler("cpu", init_scale=1e38)
    with sentinel.attach(net, optimizer, scaler=scaler):
        for _ in range(3):
            optimizer.zero_grad()
            scaler.scale(net(torch.full((2, 6), 1e3)).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update(1.0)
    assert len(made) == 1


def test_the_governor_counts_what_the_device_feels() -> None:
    """Costs and spacings count the part that the device feels, by each optimizer's own share."""

    def run(first: float, second: float) -> Governor:
        governor = make_governor(0.01)
        for seq in range(200):
            if governor.due(2, seq):
                governor.record_sample(2, 0.004)
            governor.record_sample(1, 0.001)
            governor.aside(0.001, second)
            governor.record_step(seq, 0.1, 0.002, first)
        return governor

    assert run(1.0, 1.0).costs["hooks"] == pytest.approx(0.03)
    assert run(0.1, 1.0).costs["hooks"] == pytest.approx(0.012)
    assert run(0.1, 0.1).costs["hooks"] == pytest.approx(0.003)
    assert (run(1.0, 1.0).spacing[1], run(0.1, 0.1).spacing[1]) == (256, 1)
    assert run(1.0, 0.1).hook_seconds == pytest.approx(200 * 0.003)
