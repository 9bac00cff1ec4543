"""Every kind of tensor and nesting is restored as it was."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

from sentinel.errors import RollbackError
from sentinel.hooks.core.threads import Worker
from sentinel.hooks.snapshot.host_buffer import HostBuffer
from sentinel.hooks.snapshot.parts import ExtraState, StatefulPart
from sentinel.hooks.snapshot.snapshot import Snapshot
from sentinel.hooks.snapshot.training_state import Buffers, OptimizerState, Weights
from tests.rollback.training import assert_same, note_cells


class Holder:
    """An object whose state may be anything."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


def taken(*parts: Any) -> Snapshot:
    snapshot = Snapshot()
    snapshot.take(0, parts, lambda nbytes: None)
    snapshot.copy()
    snapshot.seal()
    snapshot.release()
    assert snapshot.flaw() == ""
    return snapshot


ODD = {
    "float16": torch.randn(3, 5).half(),
    "bfloat16": torch.randn(7).bfloat16(),
    "float8": torch.randn(9).to(torch.float8_e4m3fn),
    "float64": torch.randn(2, 2, 2).double(),
    "complex": torch.randn(5, dtype=torch.complex64),
    "bool": torch.tensor([True, False, True]),
    "bytes": torch.arange(13, dtype=torch.uint8),
    "number": torch.tensor(3.5),
    "empty": torch.empty(0, 4),
    "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "transposed": torch.randn(6, 4).t(),
    "gaps": torch.randn(8, 8)[::2, 1::3],
    "infinite": torch.tensor([torch.inf, torch.nan]),
    "conjugate": torch.randn(3, 5, dtype=torch.complex64).mH,
    "negative": torch.randn(4, dtype=torch.complex64).conj().imag,
}


@pytest.mark.parametrize("kind", ODD)
def test_each_kind_of_tensor(kind: str) -> None:
    before = copy.deepcopy(ODD[kind])
    holder = Holder({"tensor": ODD[kind]})
    snapshot = taken(StatefulPart(holder, "state"))
    holder.state = {}
    snapshot.restore([StatefulPart(holder, "state")])
    assert_same(holder.state["tensor"], before)
    assert holder.state["tensor"].data_ptr() != ODD[kind].data_ptr() or not before.numel()


def test_what_did_not_fit_at_the_end_of_the_iteration_is_not_written() -> None:
    """Until it is copied, it only refers to the live tensors that go on being trained."""
    part = StatefulPart(Holder({"average": torch.ones(3)}), "state")
    snapshot = taken(part)

    def refuse(nbytes: int) -> None:
        raise RollbackError(f"no memory for {nbytes} bytes")

    with pytest.raises(RollbackError, match="no memory"):
        snapshot.finish([part], refuse)
    with pytest.raises(RollbackError, match="the iteration of step 0 is not over"):
        snapshot.export_named([part])


def test_nesting() -> None:
    class Own:
        def __init__(self) -> None:
            self.tensor = torch.ones(2)

    state = {"list": [torch.ones(1), [2, (torch.zeros(3), None)]], 7: "text", "own": Own(), "nothing": {}}
    holder = Holder(state)
    snapshot = taken(StatefulPart(holder, "state"))
    state["list"][0].fill_(9)  # type: ignore[index]
    state["own"].tensor.fill_(9)  # type: ignore[attr-defined]
    snapshot.restore([StatefulPart(holder, "state")])
    assert_same(holder.state["list"], [torch.ones(1), [2, (torch.zeros(3), None)]])
    assert_same(holder.state["own"].tensor, torch.ones(2))
    assert (holder.state[7], holder.state["nothing"]) == ("text", {})


def test_a_module_keeps_the_metadata_of_its_state_dict() -> None:
    loaded: list[dict[str, Any]] = []

    class Noting(nn.BatchNorm1d):
        def _load_from_state_dict(self, state: Any, prefix: str, local_metadata: Any, *more: Any) -> None:
            loaded.append(local_metadata)
            super()._load_from_state_dict(state, prefix, local_metadata, *more)

    module = Noting(3)
    snapshot = taken(StatefulPart(module, "state"))
    before = copy.deepcopy(module.state_dict())
    module(torch.randn(4, 3))
    snapshot.restore([StatefulPart(module, "state")])
    assert_same(dict(module.state_dict()), dict(before))
    assert loaded == [{"version": 2}]


def test_the_memory_is_used_again_until_the_layout_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    cells = note_cells(monkeypatch)
    tensors: list[Tensor] = [torch.randn(4), torch.randn(5).double()]
    holder = Holder(tensors)
    snapshot = taken(StatefulPart(holder, "state"))
    addresses = [cell.kept.data_ptr() for cell in cells]
    snapshot.take(1, [StatefulPart(holder, "state")], lambda nbytes: None)
    assert [cell.kept.data_ptr() for cell in cells] == addresses * 2
    tensors.append(torch.randn(100))
    needed: list[int] = []
    snapshot.take(2, [StatefulPart(holder, "state")], needed.append)
    snapshot.copy()
    assert needed == [snapshot.nbytes] == [64 + 64 + 448]


def test_the_memory_is_used_again_once_it_was_summed_up(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    waited = threading.Event()

    def sum_up() -> None:
        waited.wait(60)
        log.append("summed up")

    model = nn.Linear(2, 2)
    snapshot = taken(Weights([model], []))
    worker = Worker("sums up")
    snapshot.sealing = worker.submit(sum_up)
    wait, seat = Snapshot.wait, HostBuffer.seat
    monkeypatch.setattr(Snapshot, "wait", lambda self: (waited.set(), wait(self)))
    monkeypatch.setattr(HostBuffer, "seat", lambda self, cells: (log.append("seated"), seat(self, cells)))
    snapshot.take(1, [Weights([model], [])], lambda nbytes: None)
    waited.set()
    assert log == ["summed up", "seated"]


def test_weights_that_share_a_storage_but_not_a_parameter() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight.data = model[0].weight.data
    before = model[0].weight.detach().clone()
    parts = [Weights([model], []), Buffers([model])]
    snapshot = taken(*parts)
    model[0].weight.data.zero_()
    snapshot.restore(parts)
    assert_same(model[1].weight, before)
    assert model[1].weight.data_ptr() == model[0].weight.data_ptr()


@pytest.mark.parametrize("view_first", [True, False])
def test_a_parameter_that_is_the_beginning_of_another(view_first: bool) -> None:
    """Of two parameters that begin at one address, the longer one has more to restore."""
    whole = nn.Parameter(torch.arange(6.0))
    model = nn.ParameterList([nn.Parameter(whole.data[:2]), whole] if view_first else [whole])
    if not view_first:
        model.append(nn.Parameter(whole.data[:2]))
    snapshot = taken(Weights([model], []))
    whole.data.zero_()
    snapshot.restore([Weights([model], [])])
    assert whole.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]


@pytest.mark.parametrize("kind", ["wrapper", "sparse", "meta"])
def test_what_cannot_be_copied_as_it_lies_is_refused(kind: str) -> None:
    """Tensors that hold others have no memory of their own: copying from there would end the process."""
    odd = {
        "wrapper": lambda: TwoTensor(torch.ones(3), torch.ones(3)),
        "sparse": lambda: torch.eye(3).to_sparse(),
        "meta": lambda: torch.ones(3, device="meta"),
    }[kind]()
    parameter = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    optimizer.state[parameter] = {"odd": odd}
    with pytest.raises(RollbackError, match=r"odd is a .*: leave rollback out"):
        taken(OptimizerState(optimizer, "optimizer", Weights([], [optimizer]), first=True))
    model = nn.Linear(2, 2)
    model.register_buffer("odd", odd)
    with pytest.raises(RollbackError, match="odd is a"):
        Buffers([model])


@pytest.mark.parametrize("gaps", [False, True])
def test_a_tensor_whose_memory_was_taken_away(gaps: bool) -> None:
    """Code that offloads weights does this between two steps. Reading the memory would end the process."""
    net = nn.Module()
    net.weight = nn.Parameter(torch.ones(6, 8)[:, :4] if gaps else torch.ones(6, 4))
    snapshot = Snapshot()
    snapshot.take(0, [Weights([net], [])], lambda nbytes: None)
    net.weight.untyped_storage().resize_(0)
    with pytest.raises(RollbackError, match="memory of weight was taken away"):
        snapshot.copy()


def test_state_tensors_that_have_come_to_be_one() -> None:
    """The optimizer keeps its best state by reference: two values cannot be copied into one place."""
    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    optimizer.state[parameter] = {"present": torch.full((2,), 1.0), "best": torch.full((2,), 2.0)}
    parts = [OptimizerState(optimizer, "optimizer", Weights([], [optimizer]), first=True)]
    snapshot = taken(*parts)
    optimizer.state[parameter]["best"] = optimizer.state[parameter]["present"]
    snapshot.restore(parts)
    assert_same(dict(optimizer.state[parameter]), {"present": torch.full((2,), 1.0), "best": torch.full((2,), 2.0)})


def test_parameters_of_an_optimizer_that_no_model_has(monkeypatch: pytest.MonkeyPatch) -> None:
    model, temperature = nn.Linear(2, 2), nn.Parameter(torch.tensor(0.7))
    optimizer = torch.optim.SGD([*model.parameters(), temperature], lr=1.0)
    parts, cells = [Weights([model], [optimizer])], note_cells(monkeypatch)
    snapshot = taken(*parts)
    temperature.data.fill_(0.0)
    snapshot.restore(parts)
    assert float(temperature.detach()) == pytest.approx(0.7)
    assert [cell.name for cell in cells] == ["weight", "bias", "param_groups[0][2]"]


def test_a_buffer_that_two_modules_share_is_kept_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(3))
    model[1].running_mean = model[0].running_mean
    cells = note_cells(monkeypatch)
    taken(Buffers([model]))
    assert len(cells) == 5


def test_a_module_with_extra_state_that_is_gone_is_named() -> None:
    class Scale(nn.Module):
        def get_extra_state(self) -> int:
            return 7

    model = nn.ModuleDict({"scale": Scale()})
    parts = [ExtraState([model])]
    snapshot = taken(*parts)
    del model["scale"]
    with pytest.raises(RollbackError, match="the model has no module 'scale' with extra state, which the snapshot has"):
        snapshot.restore(parts)


def test_the_change_detector_sees_one_element_that_no_sample_holds() -> None:
    weight = nn.Parameter(torch.zeros(1 << 20))
    snapshot = Snapshot()
    snapshot.take(0, [Weights([nn.ParameterList([weight])], [])], lambda nbytes: None)
    detector = snapshot.write_detector()
    assert not detector.has_changed()
    with torch.no_grad():
        weight[1] = 1.0
    assert detector.has_changed()


@pytest.mark.parametrize("kind", ["conjugate", "negative"])
def test_the_change_detector_sees_a_tensor_that_is_computed_when_it_is_read(kind: str) -> None:
    made = torch.randn(4, dtype=torch.complex64).conj()
    weight = nn.Parameter(made if kind == "conjugate" else made.imag)
    assert weight.is_conj() or weight.is_neg()
    snapshot = Snapshot()
    snapshot.take(0, [Weights([nn.ParameterList([weight])], [])], lambda nbytes: None)
    detector = snapshot.write_detector()
    assert not detector.has_changed()
    weight.data[-1].add_(1)
    assert detector.has_changed()
