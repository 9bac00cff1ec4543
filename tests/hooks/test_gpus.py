"""Which GPUs a rank reports to train on. There are none here: torch.cuda is replaced (synthetic)."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import sentinel
from sentinel import wire
from sentinel.hooks.session.arguments import gpus
from tests.hooks.conftest import FakeDaemon


class Placed(torch.nn.Module):
    """A module whose parameters are on the given GPUs."""

    def __init__(self, *indices: int, device_ids: list[int] | None = None) -> None:
        super().__init__()
        self._on = indices
        if device_ids is not None:
            self.device_ids = device_ids

    def parameters(self, recurse: bool = True):  # type: ignore[no-untyped-def]
        return iter([SimpleNamespace(device=torch.device("cuda", index)) for index in self._on])


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 5)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=f"uuid-{index}"))


@pytest.mark.usefixtures("cuda")
def test_the_devices_of_the_parameters() -> None:
    assert gpus([Placed(1), Placed(0, 1)]) == ("uuid-0", "uuid-1")
    assert gpus([Placed(0, device_ids=[0, 2])]) == ("uuid-0", "uuid-2")


@pytest.mark.usefixtures("cuda")
def test_parameters_on_the_host_train_on_the_present_device() -> None:
    assert gpus([torch.nn.Linear(2, 2)]) == ("uuid-5",)


def test_an_older_torch_has_no_uuid(cuda: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace())
    assert gpus([Placed(0)]) == ()


def test_a_run_on_the_cpu_names_no_gpu(daemon: FakeDaemon) -> None:
    model = torch.nn.Linear(2, 2)
    with sentinel.attach(model, torch.optim.SGD(model.parameters(), lr=0.1)):
        daemon.wait(lambda: daemon.of(wire.Hello))
    assert daemon.of(wire.Hello)[0].gpus == ()
