"""A probe and a receiver of another package, tested as its authors can: only by `sentinel.testing`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import sentinel
from sentinel.config import settings
from sentinel.config.settings import ReceiverSettings
from sentinel.hooks import Probe
from sentinel.notify import Delivery, Message
from sentinel.testing import FakeDaemon, deliver, make_case, make_message

PROBE = """
import torch
from sentinel.hooks import Probe

class GradientMean(Probe):
    tier = 2
    signals = {"grad_mean": "layer", "grad_mean_least": "rank"}

    def before(self, step):
        means = torch.stack([gradient.mean() for gradient in step.gradients.tensors])
        step.layers["grad_mean"] = means
        step.values["grad_mean_least"] = means.min()
"""


@pytest.fixture
def installed_probe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the files that `pip install` of a package with this entry point leaves."""
    (tmp_path / "means-1.dist-info").mkdir()
    (tmp_path / "means-1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: means\nVersion: 1\n")
    (tmp_path / "means-1.dist-info" / "entry_points.txt").write_text("[sentinel.probes]\nmeans = means:GradientMean\n")
    (tmp_path / "means.py").write_text(PROBE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "means", raising=False)


@pytest.mark.usefixtures("installed_probe")
def test_a_probe_streams_the_values_that_are_computed_by_hand() -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    expected: dict[int, dict[str, float]] = {}
    with FakeDaemon() as daemon:
        with sentinel.attach(model, optimizer, address=daemon.address):
            for seq in range(2):
                optimizer.zero_grad()
                model(torch.randn(4, 3)).square().mean().backward()
                expected[seq] = {
                    name: float(p.grad.mean()) for name, p in model.named_parameters() if p.grad is not None
                }
                optimizer.step()
        assert daemon.wait_for_goodbye().reason == "detach"
        assert daemon.layers("grad_mean") == {seq: pytest.approx(means) for seq, means in expected.items()}
        least = {seq: min(means.values()) for seq, means in expected.items()}
        assert daemon.series("grad_mean_least") == pytest.approx(least)
    assert not daemon.path.parent.exists()


class Diary:
    """A receiver that writes into a file."""

    def __init__(self, settings: ReceiverSettings) -> None:
        self.path, self.closed = Path(settings.options["path"]), False

    async def deliver(self, message: Message) -> Delivery:
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(f"{message.group} {message.leading.state}: {message.leading.summary}\n")
        except OSError as error:
            return Delivery(fault="connection", detail=str(error.strerror), retry=True)
        return Delivery()

    async def close(self) -> None:
        self.closed = True


def make_diary(path: Path) -> Diary:
    return Diary(ReceiverSettings(name="diary", type="diary", options={"path": str(path)}))


def test_a_receiver_takes_messages_and_reports_their_delivery(tmp_path: Path) -> None:
    diary = make_diary(tmp_path / "diary")
    firing, over = make_message(), make_message(make_case(state="resolved", alert="Divergence"))
    assert [delivery.fault for delivery in deliver(diary, firing, over)] == [None, None]
    assert diary.closed
    first, second = diary.path.read_text().splitlines()
    assert first.startswith("r1/LossSpike firing: loss 6.861 ")
    assert second.startswith("r1/Divergence resolved: ")
    (refused,) = deliver(make_diary(tmp_path), firing)
    assert (refused.fault, refused.retry) == ("connection", True)


def test_names_of_version_0_1_go_on_working() -> None:
    with pytest.warns(DeprecationWarning, match="settings.Receiver is called ReceiverSettings now"):
        from sentinel.config.settings import Receiver  # type: ignore[attr-defined]
    assert Receiver is ReceiverSettings
    with pytest.warns(DeprecationWarning, match="settings.Route is called RouteSettings now"):
        assert settings.Route is settings.RouteSettings  # type: ignore[attr-defined]
    assert not hasattr(settings, "Router")


def test_a_probe_that_defines_what_disarm_was_called_in_version_0_1_is_called() -> None:
    class Mixin:
        def over(self, step: Any) -> None:
            step.values["mixin"] = 0.0

    with pytest.warns(DeprecationWarning, match="Former.over is called disarm now"):

        class Former(Probe):
            def over(self, step: Any) -> None:
                super().over(step)
                step.values["over"] = 1.0

    with pytest.warns(DeprecationWarning, match="Mixin.over is called disarm now"):

        class Mixed(Mixin, Probe):
            pass

    class Present(Former):
        def disarm(self, step: Any) -> None:
            super().disarm(step)
            step.values["present"] = 2.0

    with pytest.warns(DeprecationWarning, match="OfPresent.over is called disarm now"):

        class OfPresent(Present):
            def over(self, step: Any) -> None:
                super().over(step)

    step: Any = SimpleNamespace(values={})
    OfPresent().disarm(step)
    assert step.values == {"over": 1.0, "present": 2.0}
    Mixed().disarm(step)
    assert step.values["mixin"] == 0.0


def test_a_probe_that_sets_flags_under_their_names_of_version_0_1_is_obeyed() -> None:
    with pytest.warns(DeprecationWarning, match="Former.(spared|blind) is called"):

        class Former(Probe):
            spared = blind = True

    class Present(Probe):
        skipped_on_fast_path = True

    assert (Former.skipped_on_fast_path, Former.needs_no_gradients) == (True, True)
    assert (Present.spared, Present.blind) == (True, False)


def test_a_message_can_be_made_about_ranks_and_with_any_attribute() -> None:
    message = make_message(make_case(ranks=3), repeated=True)
    assert [member.name for member in message.cases[0].members] == ["0", "1", "2"]
    assert message.repeated


def test_a_daemon_that_got_nothing_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sentinel.testing.fake_daemon.WAIT_SECONDS", 0.0)
    with FakeDaemon() as daemon, pytest.raises(AssertionError, match=r"got \[\]"):
        daemon.wait_for_goodbye()


def test_neither_torch_nor_a_test_framework_is_loaded() -> None:
    code = "import json, sys, sentinel.testing; print(json.dumps([*{'torch', 'pytest', 'numpy'} & {*sys.modules}]))"
    loaded: Any = subprocess.run([sys.executable, "-c", code], cwd="/", capture_output=True, text=True, check=True)
    assert json.loads(loaded.stdout) == []
