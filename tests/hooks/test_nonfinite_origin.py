"""Where the first non-finite value came from; looking for it leaves the run as it would be without."""

from __future__ import annotations

import copy
import dataclasses
import math
import random
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import sentinel
from sentinel import wire
from sentinel.hooks.evidence import nonfinite_origin as origin_module
from sentinel.hooks.evidence.collector import EvidenceCollector
from sentinel.hooks.evidence.nonfinite_origin import trace_origin
from sentinel.hooks.evidence.nonfinite_trace import Trace
from sentinel.hooks.loop import forward_passes as capture_module
from sentinel.hooks.loop.forward_passes import CallSlot, keep
from sentinel.hooks.loop.step_accumulator import StepTotals
from sentinel.hooks.measure.probe import Step as Stepped
from sentinel.wire.evidence import Provenance
from tests.hooks.conftest import FakeDaemon
from tests.hooks.faulty import WIDTH, Case, Net, Step, cases
from tests.hooks.sessions import find_session

CASES = list(cases())
COMPILED = [case for case in CASES if case.model.checkpointed is None][::4]
"""Cases without checkpoints: Dynamo's `eager` backend cannot run a batch norm in a checkpoint's backward pass."""


def provenance(case: Case, model: Any = None) -> Provenance:
    """Return the origin for one step of a loop, which asks after its backward pass."""
    model = case.model if model is None else model
    torch.manual_seed(5)
    kept = keep((case.batch,), {})
    output = model(case.batch)
    kept.hold_gradients(output)
    loss = case.loss(output)
    loss.backward()
    return trace_origin(model, kept, 7, loss_finite=math.isfinite(loss.item()), refuse_collectives=False)


def check(case: Case, found: Provenance) -> None:
    assert (found.origin, found.phase, found.module) == (case.origin, case.phase, case.module), found
    assert case.operation in found.operation
    assert found.tensors == case.tensors
    assert found.seq == 7
    assert not found.missing
    if found.origin == "operation":
        assert "faulty.py:" in found.line
        assert found.inputs_finite
        assert found.weights_finite


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_the_module_is_named(case: Case) -> None:
    check(case, provenance(case))


def test_there_are_thirty_faults() -> None:
    assert sum(case.origin != "nothing" for case in CASES) >= 30


@pytest.mark.sampled(2)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:The .grad attribute:UserWarning")
@pytest.mark.parametrize("case", COMPILED, ids=[case.name for case in COMPILED])
@pytest.mark.parametrize("part", [False, True])
def test_the_module_is_named_in_a_compiled_model(case: Case, part: bool) -> None:
    torch._dynamo.reset()
    model = copy.deepcopy(case.model)  # the case is other tests' too
    if part:
        for module in model.modules():
            if type(module).__name__ == "Block":
                module.compile(backend="eager")
        check(case, provenance(case, model))
    else:
        check(case, provenance(case, torch.compile(model, backend="eager")))
    torch._dynamo.reset()


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("number", [1, 6, 11, 16, 21])
def test_the_module_is_named_under_ddp(number: int, group: None) -> None:
    case = CASES[number]
    assert all(p.isfinite().all() for p in case.model.parameters()), "DDP broadcasts them at its start"
    check(case, provenance(case, nn.parallel.DistributedDataParallel(copy.deepcopy(case.model))))


class Talking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean()
        dist.all_reduce(mean)
        return self.inner(x) / (mean - mean)


def test_no_rank_begins_a_collective_alone(group: None) -> None:
    model, batch = Talking(), torch.randn(4, WIDTH)
    found = trace_origin(model, keep((batch,), {}), 7, loss_finite=False, refuse_collectives=True)
    assert found.origin == "not known"
    assert "communicates (c10d.allreduce_" in found.missing[0]


def test_broken_weights_are_named_where_the_batch_cannot_be_run_again(group: None) -> None:
    model = Talking()
    bad, weight = next(iter(model.named_parameters()))
    nn.init.constant_(weight, math.nan)
    found = trace_origin(model, keep((torch.randn(4, WIDTH),), {}), 7, loss_finite=False, refuse_collectives=True)
    assert (found.origin, found.weights_finite, found.bad_weights) == ("not known", False, (bad,))


class Returning(nn.Module):
    """Returns a second output, made from its second input by `function`."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.inner, self.function = nn.Linear(WIDTH, WIDTH), function

    def forward(self, x: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
        return self.inner(x), self.function(other)


def test_an_output_that_is_an_input_does_not_put_the_blame_on_the_loss() -> None:
    args = torch.randn(4, WIDTH), torch.full((4, WIDTH), math.nan)
    found = trace_origin(Returning(lambda other: other), keep(args, {}), 7, loss_finite=False, refuse_collectives=False)
    assert (found.origin, found.inputs_finite) == ("not known", None)
    assert "return an input as it is" in found.missing[0]


@pytest.mark.parametrize("loss_finite", [False, True])
def test_a_mask_among_the_outputs_is_no_origin_where_the_loss_is_finite(loss_finite: bool) -> None:
    model = Returning(lambda other: other.masked_fill(other > 0, -math.inf))
    kept = keep((torch.randn(4, WIDTH), torch.ones(4, WIDTH)), {})
    found = trace_origin(model, kept, 7, loss_finite=loss_finite, refuse_collectives=False)
    assert found.origin == ("nothing" if loss_finite else "operation")


def test_a_backward_pass_that_was_not_followed_to_its_end_is_not_called_clean(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = next(case for case in CASES if case.phase == "backward" and case.origin == "operation")
    model = copy.deepcopy(case.model)

    def pass_time(_: Tensor) -> None:
        clock.setattr("sentinel.hooks.evidence.nonfinite_trace.time.perf_counter", lambda: math.inf)

    def watch(_: nn.Module, args: object, output: Tensor) -> None:
        output.register_hook(pass_time)  # type: ignore[no-untyped-call]

    kept = keep((case.batch,), {})
    output = model(case.batch)
    kept.hold_gradients(output)
    case.loss(output).backward()
    model.register_forward_hook(watch)
    with monkeypatch.context() as clock:
        found = trace_origin(model, kept, 7, loss_finite=True, refuse_collectives=False)
    assert found.origin == "not known"
    assert "the backward pass took over 20 s" in found.missing[0]


@pytest.mark.parametrize("slots", [False, True])
def test_a_batch_in_a_data_class_is_looked_into(daemon: FakeDaemon, slots: bool) -> None:
    @dataclasses.dataclass(slots=slots)
    class Batch:
        features: Tensor

    class Reading(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(WIDTH, 1)

        def forward(self, batch: Batch) -> Batch:
            return Batch(self.inner(batch.features))

    net = Reading()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    sentinel.attach(net, optimizer)
    net(Batch(torch.full((4, WIDTH), math.nan))).features.mean().backward()
    optimizer.step()
    daemon.wait(lambda: told(daemon))
    assert (told(daemon)[0].origin, told(daemon)[0].tensors) == ("data", ("args[0].features",))


def test_a_value_from_outside_of_the_call_is_told_from_one_made_of_finite_inputs() -> None:
    outside = torch.full((4, WIDTH), math.nan)

    class Reading(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x + outside)

    model = Reading(WIDTH, 1)
    found = trace_origin(model, keep((torch.randn(4, WIDTH),), {}), 7, loss_finite=False, refuse_collectives=False)
    assert (found.origin, found.operation, found.inputs_finite) == ("operation", "aten.add", False)


def test_sharded_parameters_are_reported_as_out_of_reach(group: None) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = Net(nn.GELU())
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    found = trace_origin(model, keep((torch.randn(4, WIDTH),), {}), 7, loss_finite=False, refuse_collectives=True)
    assert found.origin == "not known"
    assert "gathered by all ranks" in found.missing[0]
    assert found.weights_finite


def test_a_batch_that_was_written_into_is_not_trusted() -> None:
    batch = torch.randn(4, WIDTH)
    kept = keep((batch,), {})
    batch.zero_()
    found = trace_origin(Net(nn.GELU()), kept, 7, loss_finite=False, refuse_collectives=False)
    assert found.missing == ("the batch was written into after the model had it",)


def test_a_large_batch_is_not_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture_module, "BATCH_BYTES", 1000)
    model = nn.Linear(WIDTH, 1)
    kept = keep((torch.randn(100, WIDTH),), {})
    assert kept is None
    found = trace_origin(model, kept, 7, loss_finite=False, refuse_collectives=False)
    assert "no call of the model was held" in found.missing[0]


def test_large_outputs_have_a_stand_in_for_their_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture_module, "GRADIENT_BYTES", 8)
    case = next(case for case in CASES if case.phase == "backward" and case.origin == "operation")
    found = provenance(case)
    assert (found.module, found.origin) == (case.module, "operation")
    assert "a constant stood for it" in found.missing[0]


def test_a_model_that_raises_is_reported() -> None:
    def broken(x: Tensor) -> Tensor:
        raise RuntimeError("only once")

    found = trace_origin(
        Net(Step(broken)), keep((torch.randn(4, WIDTH),), {}), 7, loss_finite=False, refuse_collectives=False
    )
    assert found.missing == ("the model could not be run once more: RuntimeError: only once",)


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("place", ["_name_modules", "leaves"])
def test_anomaly_detection_is_as_it_was_whatever_raises(
    monkeypatch: pytest.MonkeyPatch, place: str, before: bool
) -> None:
    """torch turns it on where the object is made, not where its block begins: what raises in between leaves it on."""

    def broken(*_: Any) -> Any:
        raise RuntimeError("no room")

    monkeypatch.setattr(origin_module, place, broken)
    model, batch = Net(nn.GELU()), torch.randn(4, WIDTH)
    with torch.autograd.set_detect_anomaly(before, False):
        found = trace_origin(model, keep((batch,), {}), 7, loss_finite=True, refuse_collectives=False)
        assert torch.is_anomaly_enabled() is before
    assert "RuntimeError: no room" in found.missing[0]


def test_a_memory_that_is_nearly_full_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sentinel.hooks.evidence.nonfinite_origin.memory_left", lambda: (100.0, "a test"))
    found = trace_origin(
        Net(nn.GELU()), keep((torch.randn(4, WIDTH),), {}), 7, loss_finite=False, refuse_collectives=False
    )
    assert "0 MB are left" in found.missing[0]


# In a loop.


class Loop:
    """Trains a net whose fault comes and goes; `numpy`, `random` and dropout draw numbers."""

    def __init__(self, *, watched: bool, scaler: bool = False, **options: Any) -> None:
        torch.manual_seed(0)
        random.seed(0)
        numpy.random.seed(0)
        self.faulty = False
        self.net = Net(Step(self.middle))
        for block in self.net.blocks:
            block.counts = True
        self.optimizer = torch.optim.AdamW(self.net.parameters(), 1e-3)
        self.scaler = torch.amp.GradScaler("cpu", enabled=scaler)
        self.watch = sentinel.attach(self.net, self.optimizer, **options) if watched else None

    def middle(self, x: Tensor) -> Tensor:
        x = x + random.random() + float(numpy.random.rand())
        return torch.sqrt((x * (x > 0)) if self.faulty else x.square() + 1)

    def run(self, steps: int, faulty: frozenset[int] = frozenset()) -> None:
        for step in range(steps):
            self.faulty = step in faulty
            batch = torch.randn(16, WIDTH)
            self.optimizer.zero_grad()
            loss = self.net(batch).square().mean()
            self.scaler.scale(loss).backward()
            if self.scaler.is_enabled():
                self.scaler.step(self.optimizer)
                self.scaler.update()
            elif step not in faulty:
                self.optimizer.step()
            else:
                self._clipped()

    def _clipped(self) -> None:
        """Set what is not finite to 0 after the optimizer has seen it, as some loops do."""
        for parameter in self.net.parameters():
            assert parameter.grad is not None
        self.optimizer.step()
        for parameter in self.net.parameters():
            parameter.data.nan_to_num_(0.0)
        for state in self.optimizer.state.values():
            for value in state.values():
                value.nan_to_num_(0.0)

    def state(self) -> list[Any]:
        tensors = [*self.net.state_dict().values()]
        tensors += [value for state in self.optimizer.state.values() for value in state.values()]
        counts = [len(block.outputs) for block in self.net.blocks] + [block.calls for block in self.net.blocks]
        return [*tensors, torch.get_rng_state(), torch.tensor(numpy.random.get_state()[1].astype("int64")), *counts]


def told(daemon: FakeDaemon) -> list[Provenance]:
    content = [one.content for one in daemon.of(wire.Collected) if one.what == "provenance"]
    return [msgspec.convert(one, Provenance) for one in content]


def test_a_run_is_the_same_to_the_bit_with_and_without_it(daemon: FakeDaemon) -> None:
    bare = Loop(watched=False)
    bare.run(30, frozenset({20}))
    loop = Loop(watched=True)
    loop.run(30, frozenset({20}))
    for a, b in zip(bare.state(), loop.state(), strict=True):
        assert torch.equal(a, b) if isinstance(a, Tensor) else a == b
    daemon.wait(lambda: told(daemon))
    found = told(daemon)[0]
    assert (found.seq, found.phase, found.module) == (20, "backward", "blocks.1.middle")
    assert "SqrtBackward0" in found.operation


def test_a_withheld_step_is_looked_into_when_asked(daemon: FakeDaemon) -> None:
    loop = Loop(watched=True, scaler=True)
    loop.run(10, frozenset({5}))
    daemon.wait(lambda: len(daemon.seqs()) == 10)
    assert not told(daemon)
    daemon.send(wire.Ask(id=3, what="provenance"))
    daemon.wait(lambda: any(reply.id == 3 and reply.ok for reply in daemon.of(wire.Reply)))
    loop.run(10, frozenset({5, 6}))
    daemon.wait(lambda: told(daemon))
    loop.watch.detach()  # type: ignore[union-attr]
    daemon.ended()
    assert [(found.seq, found.module, found.exact) for found in told(daemon)] == [(15, "blocks.1.middle", True)]


def test_a_call_that_another_thread_releases_while_it_returns_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the sender's does where the watch ends by a fault."""
    slot = CallSlot(Net(nn.GELU()))
    slot.kept = keep((torch.ones(4, WIDTH),), {})
    monkeypatch.setattr(type(slot.kept), "hold_gradients", lambda *_: setattr(slot, "kept", None))
    slot.record_return(torch.ones(1))
    assert slot.draws is None


def test_what_a_device_holds_is_waited_for_once_when_asked() -> None:
    """A tensor stands in for a loss on a device, which is not read unless the daemon asks."""
    sent: list[wire.Message] = []
    net = Net(nn.GELU())
    slot = CallSlot(net)
    collector = EvidenceCollector([slot], sent.append)

    def look(seq: int, loss: float) -> None:
        slot.kept = keep((torch.full((4, WIDTH), loss),), {})
        collector.look(Stepped(seq, None, StepTotals(loss=torch.tensor(loss))), withheld=False, exact=True)

    look(0, math.nan)
    assert not sent
    collector.ask("provenance")
    look(1, 1.0)
    look(2, math.nan)  # the one look was spent on a healthy step
    assert not sent
    collector.ask("provenance")
    look(3, math.nan)
    (found,) = [msgspec.convert(one.content, Provenance) for one in sent if isinstance(one, wire.Collected)]
    assert (found.seq, found.origin, found.tensors) == (3, "data", ("args[0]",))
    assert not collector.provenance_asked


def test_nothing_is_kept_where_the_user_says_so(daemon: FakeDaemon) -> None:
    loop = Loop(watched=True, provenance=False)
    loop.run(10, frozenset({5}))
    loop.watch.detach()  # type: ignore[union-attr]
    daemon.ended()
    assert not told(daemon)


def test_the_batch_is_let_go_at_the_end_of_the_step(daemon: FakeDaemon) -> None:
    import weakref

    net = nn.Linear(WIDTH, 1)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    sentinel.attach(net, optimizer)
    batch = torch.randn(4, WIDTH)
    held = weakref.ref(batch)
    net(batch).sum().backward()
    del batch
    assert held() is not None
    optimizer.step()
    assert held() is None


def test_the_micro_batch_at_fault_is_run_again(daemon: FakeDaemon) -> None:
    net = Net(nn.GELU())
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    sentinel.attach(net, optimizer)
    for micro in range(3):
        batch = torch.randn(4, WIDTH)
        if micro == 1:
            batch[2, 3] = torch.nan
        net(batch).square().mean().backward()
    optimizer.step()
    daemon.wait(lambda: told(daemon))
    assert (told(daemon)[0].origin, told(daemon)[0].tensors) == ("data", ("args[0]",))


@pytest.mark.parametrize("calls", [1, 2])
def test_a_call_before_the_last_is_not_taken_for_clean(daemon: FakeDaemon, calls: int) -> None:
    """Two batches go through the model before one backward pass, as in a contrastive loss; only the last is held."""
    net = Net(nn.GELU())
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    sentinel.attach(net, optimizer)
    healthy = torch.randn(4, WIDTH)
    other = net(torch.full((4, WIDTH), math.nan)) if calls == 2 else math.nan
    (net(healthy) - other).square().mean().backward()
    optimizer.step()
    daemon.wait(lambda: told(daemon))
    found = told(daemon)[0]
    if calls == 1:
        assert (found.origin, found.inputs_finite, found.missing) == ("loss", True, ())
    else:
        assert (found.origin, found.inputs_finite) == ("not known", None)
        assert found.missing == ("1 other call of the model in that step",)


def test_a_daemon_that_comes_late_gets_the_cause_before_the_step(
    daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = daemon.path.with_name("late.sock")
    monkeypatch.setenv("SENTINEL_ADDRESS", str(path))
    loop = Loop(watched=True)
    loop.run(4, frozenset({2}))
    assert loop.watch is not None
    find_session(loop.watch).sender.post(wire.Collected(what="out_of_memory", seq=3, content={}))
    late = FakeDaemon(path)
    late.wait(lambda: len(late.of(wire.Collected)) == 2)
    assert [found.seq for found in told(late)] == [2]
    kinds = [getattr(message, "what", type(message)) for message in late.messages]
    assert kinds.index("provenance") < kinds.index(wire.Batch)
    assert kinds.index(wire.Batch) < kinds.index("out_of_memory")  # an alert by itself, of the step before it
    loop.watch.detach()
    late.close()


def test_what_attention_keeps_padded_for_its_backward_pass_is_no_origin() -> None:
    """On CUDA the log-sum-exp is padded with infinity; the NaN is made after it."""
    library = torch.library.Library("aten", "FRAGMENT")
    library.define("_scaled_dot_product_padded_attention(Tensor query) -> (Tensor, Tensor)")
    library.define("_scaled_dot_product_padded_attention_backward(Tensor gradient, Tensor logsumexp) -> Tensor")
    library.impl("_scaled_dot_product_padded_attention", lambda query: (query + 0, torch.full((3,), math.inf)), "CPU")
    library.impl("_scaled_dot_product_padded_attention_backward", lambda gradient, _: gradient / 0 * 0, "CPU")
    with Trace({}, refuse_collectives=True, deadline=math.inf) as trace:
        output, padded = torch.ops.aten._scaled_dot_product_padded_attention(torch.ones(3))
        found = torch.ops.aten._scaled_dot_product_padded_attention_backward(output, padded)
    origin = trace.origin(found)
    assert origin is not None
    assert (origin.operation, origin.source) == ("aten._scaled_dot_product_padded_attention_backward", "")


class Graph(nn.Module):
    """A graph network: its adjacency matrix is an input, and sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, adjacency: Tensor, x: Tensor) -> Tensor:
        return self.last(torch.log(torch.relu(adjacency @ self.first(x))))


LAYOUTS = {"coo": Tensor.to_sparse_coo, "csr": Tensor.to_sparse_csr, "csc": Tensor.to_sparse_csc}


@pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta state:UserWarning")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_batch_with_a_sparse_tensor_is_kept(layout: str, daemon: FakeDaemon) -> None:
    model = Graph()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = sentinel.attach(model, optimizer)
    adjacency, x = LAYOUTS[layout](torch.eye(4)), torch.randn(4, WIDTH)
    model(adjacency, x).sum().backward()
    optimizer.step()
    monitor.detach()
    daemon.ended()
    (told,) = [one for one in daemon.of(wire.Collected) if one.what == "provenance"]
    assert (told.content["origin"], told.content["operation"]) == ("operation", "aten.log")
