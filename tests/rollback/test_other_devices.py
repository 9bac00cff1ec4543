"""Snapshots on disk that were written, or are read, on a GPU: without one, by torch's fake tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import sentinel
from bench.armed import RecordingSession
from sentinel.hooks.rollback.options import Rollback
from sentinel.hooks.rollback.restorer import Restorer
from sentinel.hooks.snapshot import capture, checkpoint_files, training_state
from sentinel.hooks.snapshot.capture import Cell
from tests.rollback.test_disk import NO_SCALER, write

pytestmark = pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")

FAKE = FakeTensorMode(allow_non_fake_inputs=True)  # type: ignore[no-untyped-call]


class Net(nn.Module):
    """One weight and one buffer. The weight has a gradient: no pass runs."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, device=device))
        self.weight.grad = torch.ones(4, device=device)
        self.register_buffer("seen", torch.ones(2, device=device))  # fake tensors of one shape share an address


def on(device: str, name: str = "") -> Cell:
    """Return a cell with the copy of a tensor on this device."""
    cell = Cell(name, torch.ones(4), judged=True)
    cell.device = torch.device(device)
    return cell


def fake(device: str) -> Tensor:
    with FAKE:
        return torch.ones(4, device=device)


@pytest.mark.parametrize("now", ["cuda:0", "cuda:1", "cpu"])
def test_a_tensor_is_read_onto_the_device_of_its_parameter(tmp_path: Path, now: str) -> None:
    """The counter of an Adam stays in host memory, as do the states of generators; an average follows the run."""
    state = {"weight": {"exp_avg": on("cuda:0"), "step": on("cpu")}}
    named = {
        "weights": {"weight": on("cuda:0")},
        "optimizers[0]": (state, {}),
        "state['average']": [on("cuda:0")],
        "random": on("cpu"),
    }
    folder = tmp_path / "snapshot"
    checkpoint_files.write(folder, named, rank=0, ranks=[0], world=1, wanted=lambda: True)
    checkpoint_files.assemble(folder, [0], lambda: True)
    read: dict[str, Any] = checkpoint_files.load(folder, 0, {"weight": fake(now)})
    found = [
        read["weights"]["weight"],
        read["optimizers[0]"][0]["weight"]["exp_avg"],
        read["state['average']"][0],
        read["optimizers[0]"][0]["weight"]["step"],
        read["random"],
    ]
    assert [str(cell.device) for cell in found] == [now, now, now, "cpu", "cpu"]


@pytest.mark.parametrize("then", ["cpu", None], ids=["written on a CPU", "written before the device was"])
def test_the_state_of_an_optimizer_follows_its_parameter_to_a_gpu(tmp_path: Path, then: str | None) -> None:
    cells = [on("cpu"), on("cpu", "weight")]
    for cell in cells:
        cell.device = torch.device(then) if then else None  # type: ignore[assignment]
    named = {"weights": {"weight": cells[1]}, "optimizers[0]": ({"weight": {"exp_avg": cells[0]}}, {})}
    folder = tmp_path / "snapshot"
    checkpoint_files.write(folder, named, rank=0, ranks=[0], world=1, wanted=lambda: True)
    checkpoint_files.assemble(folder, [0], lambda: True)
    read: dict[str, Any] = checkpoint_files.load(folder, 0, {"weight": fake("cuda:1")})
    assert str(read["optimizers[0]"][0]["weight"]["exp_avg"].device) == "cuda:1"


def test_a_run_on_a_gpu_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    net = Net("cpu")
    optimizer = torch.optim.SGD(net.parameters())
    sent: list[Any] = []
    restorer = Restorer(
        Rollback(every=1, keep=2, margin=1, directory=tmp_path),
        models=[net],
        optimizers=[optimizer],
        session=RecordingSession(sent=sent),
    )
    for seq in range(2):
        restorer.enter_step(seq)
        optimizer.step()
        restorer.exit_step(seq, skipped=False)
    assert write(restorer, sent, 0).ok
    restorer.close()

    monkeypatch.setattr(capture, "is_wrapper_tensor", lambda _: False)  # a fake tensor is of a class of its own
    monkeypatch.setattr(training_state, "has_nonfinite", lambda _: False)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda _: torch.zeros(1, dtype=torch.uint8))
    monkeypatch.setattr(capture.Copies, "make", lambda _: None)  # nothing is copied into a fake tensor
    with FAKE:
        other = Net("cuda:1")
    seen = other.seen
    assert sentinel.resume(other, torch.optim.SGD(other.parameters()), directory=tmp_path, scaler=NO_SCALER) == 1
    assert other.seen is seen  # written into, and not replaced by one in host memory
