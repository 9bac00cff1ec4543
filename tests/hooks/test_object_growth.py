"""Object growth: in every way in which loops keep tensors, the holder is found, by its name and place."""

from __future__ import annotations

import gc
import sys
from collections import defaultdict, deque
from collections.abc import Callable, Generator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sentinel.hooks.evidence import object_growth as growth_module
from sentinel.hooks.evidence.object_growth import census
from sentinel.wire.evidence import Census, Holder

STEPS = 40
FILE = __file__
losses: list[Tensor] = []
mean: Any = 0.0


@pytest.fixture(autouse=True, scope="module")
def small_heap() -> None:
    """Undo the fixture of this name: a module and a class here hold what grows, and are found by their references."""
    gc.unfreeze()


class Trainer:
    best: list[Tensor] = []

    def __init__(self) -> None:
        self.history: list[Tensor] = []
        self.mean: Any = 0.0
        self.all = torch.zeros(0, 4)
        self.logs: dict[str, list[Tensor]] = defaultdict(list)


class Outputs:
    """A forward hook that is an object."""

    def __init__(self) -> None:
        self.kept: list[Tensor] = []

    def __call__(self, module: nn.Module, args: Any, output: Tensor) -> None:
        self.kept.append(output.detach())


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 1))


def counted(step: Callable[[int, nn.Module], object], net: nn.Module | None = None) -> Census:
    """Return the census of a loop that calls `step` once a step; it begins at step 10."""
    net = net or model()
    at = [0]
    run: Generator[int, None, Census] = census(lambda: at[0], lambda: [net])
    wait = 0
    for number in range(10 * STEPS):
        at[0] = number
        step(number, net)
        if number < 10:
            continue
        wait -= 1
        if wait > 0:
            continue
        try:
            wait = next(run)
        except StopIteration as end:
            found: Census = end.value
            return found
    raise AssertionError("it does not end")


def loss_of(net: nn.Module) -> Tensor:
    loss: Tensor = net(torch.randn(8, 4)).square().mean()
    loss.backward()
    return loss


def only(found: Census) -> Holder:
    """Return the holder of tensors, which must be the only one."""
    names = [holder.name for holder in found.holders if holder.tensors]
    assert len(names) == 1, names
    return found.holders[0]


@pytest.mark.slow
def test_a_list_of_losses_in_a_module() -> None:
    losses.clear()
    holder = only(counted(lambda _, net: losses.append(loss_of(net))))
    assert holder.name == f"losses, a variable of module {__name__}"
    assert (holder.kind, holder.graph, holder.entries_per_step) == ("list", True, 1.0)
    assert holder.example == "scalar float32"


@pytest.mark.slow
def test_a_dict_of_activations_in_a_local() -> None:
    cache: dict[int, Tensor] = {}

    def step(number: int, net: nn.Module) -> None:
        cache[number] = net[0](torch.randn(8, 4)).detach()[:, 0]  # type: ignore[index]  # a view: it keeps the whole

    holder = only(counted(step))
    assert holder.name in (
        f"cache, a local of {test_a_dict_of_activations_in_a_local.__qualname__}",
        f"cache, in the closure of {step.__qualname__}",
    )
    assert FILE in holder.line
    assert holder.bytes_per_step == 8 * 64 * 4


@pytest.mark.slow
def test_an_attribute() -> None:
    trainer = Trainer()
    holder = only(counted(lambda _, net: trainer.history.append(loss_of(net).detach())))
    assert holder.name == f"Trainer.history, an attribute of a {__name__}.Trainer"
    assert not holder.graph


@pytest.mark.slow
def test_an_attribute_of_a_class() -> None:
    holder = only(counted(lambda _, net: Trainer.best.append(loss_of(net))))
    assert holder.name == f"Trainer.best, an attribute of class {__name__}.Trainer"
    Trainer.best.clear()


@pytest.mark.slow
def test_a_list_in_a_dict_in_an_attribute() -> None:
    trainer = Trainer()
    holder = only(counted(lambda _, net: trainer.logs["loss"].append(loss_of(net))))
    assert holder.name == f"Trainer.logs['loss'], an attribute of a {__name__}.Trainer"


def closure() -> Callable[[Any, Any], None]:
    kept: deque[Tensor] = deque()

    def keep(_: int, net: nn.Module) -> None:
        kept.append(loss_of(net))

    return keep


class Record:
    """What a loop keeps of a step: an object that holds a tensor."""

    def __init__(self, output: Tensor) -> None:
        self.output = output


@pytest.mark.slow
def test_a_list_of_objects_that_hold_tensors() -> None:
    records: list[Record] = []
    holder = only(counted(lambda _, net: records.append(Record(net(torch.randn(8, 4)).detach()))))
    assert holder.name.startswith("records, ")
    assert (holder.kind, holder.example, holder.bytes_per_step) == ("list", "8x1 float32", 8 * 1 * 4)


@pytest.mark.slow
def test_a_closure() -> None:
    holder = only(counted(closure()))
    assert holder.name == "kept, in the closure of closure.<locals>.keep"
    assert holder.line.startswith(FILE)
    assert holder.kind == "deque"


@pytest.mark.slow
def test_a_default_argument() -> None:
    def keep(_: int, net: nn.Module, kept: list[Tensor] = []) -> None:  # noqa: B006
        kept.append(loss_of(net))

    assert only(counted(keep)).name.startswith("a default argument, of ")


@pytest.mark.slow
def test_a_local_of_a_function() -> None:
    def loop() -> Census:
        outputs: list[tuple[int, Tensor]] = []
        bound = outputs.append
        return counted(lambda number, net: bound((number, loss_of(net).detach())))

    holder = only(loop())
    assert holder.name == f"outputs, a local of {loop.__qualname__}"
    assert holder.line.startswith(FILE + ":")


@pytest.mark.slow
def test_an_average_that_keeps_all_graphs_in_a_module() -> None:
    def step(_: int, net: nn.Module) -> None:
        global mean
        mean = 0.9 * mean + 0.1 * loss_of(net)

    holder = only(counted(step))
    assert holder.name == f"mean, a variable of module {__name__}"
    assert holder.nodes_per_step > 3
    assert (holder.kind, holder.graph) == ("tensor", True)


@pytest.mark.slow
def test_an_average_that_keeps_all_graphs_in_an_attribute_and_a_local() -> None:
    trainer, average = Trainer(), torch.zeros(())

    def step(_: int, net: nn.Module) -> None:
        nonlocal average
        trainer.mean = average = 0.9 * average + 0.1 * loss_of(net)

    names = {holder.name.split(",")[0] for holder in counted(step).holders if holder.graph}
    assert names == {"Trainer.mean", "average"}


@pytest.mark.slow
def test_a_tensor_that_is_made_longer() -> None:
    trainer = Trainer()

    def step(_: int, net: nn.Module) -> None:
        trainer.all = torch.cat([trainer.all, torch.randn(8, 4)])

    holder = only(counted(step))
    assert holder.name.startswith("Trainer.all")
    assert holder.bytes_per_step == 8 * 4 * 4


@pytest.mark.slow
def test_a_hook_that_keeps_its_output() -> None:
    net, kept = model(), list[Tensor]()
    net[1].register_forward_hook(lambda *called: kept.append(called[2]))
    holder = only(counted(lambda _, net: net(torch.randn(8, 4)), net))
    assert holder.name.startswith("kept, ")
    assert holder.hook == "1"


@pytest.mark.slow
def test_a_hook_that_is_an_object() -> None:
    net = model()
    net[0].register_forward_hook(Outputs())
    holder = only(counted(lambda _, net: net(torch.randn(8, 4)), net))
    assert (holder.name, holder.hook) == (f"Outputs.kept, an attribute of a {__name__}.Outputs", "0")


@pytest.mark.slow
def test_a_healthy_loop_has_no_holders() -> None:
    logs: list[float] = []
    net = model()
    optimizer = torch.optim.Adam(net.parameters())

    def step(_: int, net: nn.Module) -> None:
        optimizer.zero_grad()
        logs.append(loss_of(net).item())
        optimizer.step()

    found = counted(step, net)
    assert [holder for holder in found.holders if holder.tensors] == []
    assert [holder.example for holder in found.holders] == ["float"]
    assert found.tensors >= 4


@pytest.mark.slow
def test_containers_with_names_are_found_without_garbage_collection() -> None:
    """A search of all objects would disturb other threads, as all are young: what it leaves out is said."""
    trainer = Trainer()

    def step(_: int, net: nn.Module) -> None:
        trainer.history.append(loss_of(net))
        trainer.logs["loss"].append(torch.zeros(4))

    gc.disable()
    try:
        found = counted(step)
    finally:
        gc.enable()
    assert only(found).name == f"Trainer.history, an attribute of a {__name__}.Trainer"
    assert (only(found).kind, only(found).graph, only(found).entries_per_step) == ("list", True, 1.0)
    (missing,) = found.missing
    assert missing.startswith("containers that only other containers or closures hold: the garbage collector is off")
    assert not counted(step).missing


@pytest.mark.slow
def test_the_census_itself_keeps_nothing() -> None:
    net = model()
    counted(lambda _, net: loss_of(net), net)
    gc.collect()
    before = sum(issubclass(type(one), Tensor) for one in gc.get_objects())
    counted(lambda _, net: loss_of(net), net)
    gc.collect()
    assert sum(issubclass(type(one), Tensor) for one in gc.get_objects()) <= before + 2
    frame = sys._getframe()
    assert "net" in growth_module.locals_of(frame)
    assert net is frame.f_locals["net"]
