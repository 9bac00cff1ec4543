"""What a GPU feels of our time: with a simulated device, which runs what a loop launches behind the host."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import sentinel
from sentinel.hooks.core.device_clock import MOST_AWAITED, DeviceClock, make_device_clock
from sentinel.hooks.step import optimizer_monitor
from tests.hooks.conftest import FakeDaemon
from tests.hooks.loops import model


class Device:
    """Works through what was launched, in order. Seconds."""

    def __init__(self) -> None:
        self.host = self.busy_until = 0.0
        self.fails = False

    def launch(self, seconds: float) -> float:
        """When it is over."""
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


def step(device: Device, clock: DeviceClock, *, work: float, launched: float, host: float, tier: int = 2) -> float:
    """The loop launches `work` for the device in no time, then our hooks take `host` and launch `launched`."""
    device.launch(work)
    device.host = max(device.host, device.busy_until - 2 * work)  # the loop runs two steps ahead at most
    clock.begin_step()
    device.launch(launched / 2)
    device.host += host
    device.launch(launched / 2)
    clock.mark()
    return clock.end_step(tier, host)


def test_a_device_that_is_behind_feels_only_what_it_has_to_do() -> None:
    device = Device()
    clock = device.make_clock()
    felt = [step(device, clock, work=0.2, launched=0.001, host=0.02) for _ in range(20)]
    assert felt[0] == 0.02, "not known yet"
    assert felt[-1] == pytest.approx(0.001)


def test_a_device_that_waits_for_the_host_feels_all_of_it() -> None:
    device = Device()
    clock = device.make_clock()
    felt = [step(device, clock, work=0.0001, launched=0.001, host=0.02) for _ in range(20)]
    assert felt[-1] == pytest.approx(0.02, rel=0.06)


def test_what_is_sampled_is_told_apart() -> None:
    device = Device()
    clock = device.make_clock()
    for seq in range(64):
        sampled = seq % 8 == 7
        felt = step(device, clock, work=0.2, launched=0.004 * sampled, host=0.02, tier=2 * sampled)
    assert felt == pytest.approx(0.004)
    assert step(device, clock, work=0.2, launched=0.0, host=0.02, tier=0) == pytest.approx(0.0)


def test_a_device_that_stands_is_not_waited_for_and_events_do_not_pile_up() -> None:
    device = Device()
    clock = device.make_clock()
    made: list[Event] = []
    clock._make_event = lambda: made.append(Event(device)) or made[-1]
    device.busy_until = 1e9
    for _ in range(100):
        clock.begin_step()
        clock.mark()
        assert clock.end_step(1, 0.01) == 0.01
    assert len(made) == 2 * MOST_AWAITED


@pytest.mark.faults
def test_a_clock_that_fails_leaves_the_time_on_the_host(swallowed: list[str]) -> None:
    device = Device()
    clock = device.make_clock()
    for _ in range(10):
        step(device, clock, work=0.2, launched=0.001, host=0.02)
    device.fails = True
    felt = [step(device, clock, work=0.2, launched=0.001, host=0.02) for _ in range(10)]
    assert felt[-1] == 0.02
    assert len(swallowed) == 1


def test_on_the_host_there_is_none() -> None:
    assert make_device_clock(list(model().parameters())) is None
    assert make_device_clock([]) is None
    mixed = [torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(2, device="meta"))]
    assert make_device_clock(mixed) is None


def test_the_governor_counts_what_the_device_feels(daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same loop, whose device feels a hundredth: its costs are less, and its layers are sampled more often."""

    class Hundredth(DeviceClock):
        def end_step(self, tier: int, host_seconds: float) -> float:
            assert len(self._marks) % 2 == 0
            return 0.01 * host_seconds

    def run(clock: Any) -> tuple[float, int]:
        monkeypatch.setattr(optimizer_monitor, "make_device_clock", lambda parameters: clock)
        net = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(40)))
        optimizer = torch.optim.SGD(net.parameters(), 1e-3)
        with sentinel.attach(net, optimizer, overhead=0.01) as monitor:
            for _ in range(130):
                optimizer.zero_grad()
                net(torch.randn(4, 8)).square().mean().backward()
                optimizer.step()
            governor = monitor._session.governor
            return governor.costs["hooks"], governor.spacing[2]

    device = Device()
    host_cost, host_spacing = run(None)
    device_cost, device_spacing = run(Hundredth(lambda: None, lambda: Event(device)))
    assert device_cost < 0.2 * host_cost
    assert device_spacing < host_spacing
