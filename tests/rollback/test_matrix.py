"""What is restored to the bit, in memory and from disk, and what is refused by name: the table in docs/rollback.md."""

from __future__ import annotations

import copy
import gc
import random
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.parallel import DistributedDataParallel
from torch.optim import lr_scheduler as lr
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import sentinel
from bench.armed import RecordingSession
from sentinel import wire
from sentinel.errors import StateError
from sentinel.hooks.rollback.options import Rollback
from sentinel.hooks.rollback.restorer import Restorer
from sentinel.hooks.session import arguments
from sentinel.hooks.snapshot.state_owners import Owners
from tests.rollback import optimizers
from tests.rollback.training import assert_same, batches, of_type, roll_back, wait_for_disk

DATA = batches(24)
TO, AT, END = 5, 12, 20


class Net(nn.Sequential):
    def __init__(self, *more: nn.Module) -> None:
        super().__init__(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), *more, nn.Linear(16, 4, bias=False))


class Scaled(nn.Module):
    """A layer with a history that only `get_extra_state` gives out, as FP8 layers have it."""

    def __init__(self) -> None:
        super().__init__()
        self.history = torch.zeros(4)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.history = torch.cat((self.history[1:], x.detach().abs().amax().reshape(1)))
        return x / (1 + self.history.amax())

    def get_extra_state(self) -> dict[str, Tensor]:
        return {"history": self.history}

    def set_extra_state(self, state: dict[str, Tensor]) -> None:
        self.history = state["history"]


class Masked(nn.Module):
    """Makes its causal mask in the first forward pass."""

    def __init__(self, persistent: bool) -> None:
        super().__init__()
        self.persistent = persistent

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "mask"):
            self.register_buffer("mask", torch.full((16, 16), -torch.inf).triu(1), persistent=self.persistent)
        return x


class Codebook(nn.Module):
    """Overwrites a row in the forward pass, through `.data`."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.randn(4096, 16))
        self.count = 0

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.rows.data[1] = x.detach()[0]
        return x + self.rows[:12]


class Numbers(nn.Module):
    """Complex and 0-dimensional parameters, and an embedding with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.turn = nn.Parameter(torch.ones(16, dtype=torch.complex64))
        self.table = nn.Embedding(8, 16, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.turn).real * self.scale + self.table(torch.arange(12) % 8)


class Packed(nn.Module):
    """A module whose `state_dict` has an entry that is neither a parameter nor a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_state_dict_post_hook(
            lambda module, state, prefix, _: state.update({prefix + "seen": torch.ones(1)})
        )

    def forward(self, x: Tensor) -> Tensor:
        return x


UNALIKE = {"lr_lambdas", "_schedulers", "_get_lr_called_within_step", "_is_initial"}
"""Attributes of a scheduler that are not compared: functions, and flags of the call in progress."""


class Run:
    """A training script: it builds the model, arms rollback or resumes, makes its late objects and trains."""

    def __init__(self, case: Case) -> None:
        torch.manual_seed(0), random.seed(0), numpy.random.seed(0)
        self.case = case
        self.model: nn.Module = case.model()
        self.given: Any = case.optimizer(self.model)
        self.scaler: GradScaler | None = None
        self.schedulers: list[Any] = []
        self.average: AveragedModel | None = None
        self.seq = 0
        self.second: Tensor | None = None
        """The second optimizer's batch, if it differs from the first one's."""
        self.on_next: Callable[[], object] = lambda: None
        self.restorer: Restorer | None = None
        self.sent: list[Any] = []
        self.disarmed: list[str] = []
        self.watched = arguments.optimizers_of(self.given)

    def all_given(self) -> list[Any]:
        return self.given if isinstance(self.given, list) else [self.given]

    def start(self, terms: Rollback | None = None, *, resume: Path | None = None) -> None:
        if not self.case.late:
            self.case.more(self)
        if resume is not None:
            self.seq = sentinel.resume(self.model, self.given, directory=resume, **self._named())
        if terms is not None:
            self.restorer = Restorer(
                terms, models=[self.model], optimizers=self.watched, given=self.all_given(), step=self.seq,
                session=RecordingSession(
                    sent=self.sent,
                    disarmed=self.disarmed,
                    defer=lambda function: setattr(self, "on_next", function),
                ),
                **self._named(),
            )  # fmt: skip
            self.watched[0].register_step_pre_hook(lambda *_: self._enter())
        self.watched[0].register_step_post_hook(lambda *_: self._exit())
        if self.case.late:
            self.case.more(self)

    def _named(self) -> dict[str, Any]:
        """Return the scaler as an argument if it is known by now: of several in this process only one is this run's."""
        return {"scaler": self.scaler} if self.scaler is not None or not self.case.late else {}

    def _enter(self) -> None:
        assert self.restorer is not None
        self.restorer.enter_step(self.seq)

    def _exit(self) -> None:
        seq, self.seq = self.seq, self.seq + 1
        if self.restorer is not None:
            self.restorer.exit_step(seq, skipped=False)

    def loss(self, batch: Tensor) -> Tensor:
        return self.model(batch).square().mean()

    def step(self, batch: Tensor) -> None:
        self.on_next()
        self.case.step(self, batch)
        for scheduler in self.schedulers:
            scheduler.step(*([float(self.seq)] if isinstance(scheduler, lr.ReduceLROnPlateau) else []))
        if self.average is not None:
            self.average.update_parameters(self.model)

    def state(self) -> dict[str, Any]:
        layers = []
        for layer in [*self.all_given(), *self.watched]:
            inner = [one for one in vars(layer).values() if isinstance(one, torch.optim.Optimizer)]
            for one in (layer, *inner):
                parameters = [p for group in one.param_groups for p in group["params"]]
                groups = [{k: v for k, v in group.items() if k != "params"} for group in one.param_groups]
                own = [getattr(one, name, None) for name in ("slow", "phase")]
                layers.append(([dict(one.state.get(p, {})) for p in parameters], groups, own))
        return copy.deepcopy(
            {
                "parameters": [p.detach() for p in self.model.parameters()],
                "buffers": [b for _, b in self.model.named_buffers()],
                "extra": [m.history for m in self.model.modules() if isinstance(m, Scaled)],
                "optimizers": layers,
                "schedulers": [
                    {k: v for k, v in vars(s).items() if isinstance(v, int | float | list) and k not in UNALIKE}
                    for s in self.schedulers
                ],
                "scaler": self.scaler.state_dict() if self.scaler is not None else None,
                "average": dict(self.average.state_dict()) if self.average is not None else None,
                "random": (torch.get_rng_state(), random.getstate()),
            }
        )


def one_step(run: Run, batch: Tensor) -> None:
    optimizer = run.all_given()[0]
    optimizer.zero_grad()
    if isinstance(optimizer, torch.optim.LBFGS | optimizers.Sam):

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = run.loss(batch)
            loss.backward()
            return loss

        closure()
        optimizer.step(closure)
    elif run.scaler is not None:
        with torch.autocast("cpu", torch.float16):
            loss = run.loss(batch).float()
        run.scaler.scale(loss).backward()
        run.scaler.step(optimizer)
        run.scaler.update()
    else:
        run.loss(batch).backward()
        optimizer.step()


def all_step(run: Run, batch: Tensor) -> None:
    """Make one step of each optimizer, each with a backward pass of its own, as a GAN does."""
    first, second = run.given
    for optimizer, given in ((first, batch), (second, batch if run.second is None else run.second)):
        optimizer.zero_grad()
        run.loss(given).backward()
        optimizer.step()


def swap_step(run: Run, batch: Tensor) -> None:
    """Make a training step, and compute the validation loss after every second one."""
    run.given.train()
    one_step(run, batch)
    if run.seq % 2 == 0:
        run.given.eval()
        run.model.eval()
        with torch.no_grad():
            run.on_next()
            run.loss(batch)
        run.model.train()


def nothing(run: Run) -> None:
    pass


@dataclass(frozen=True)
class Case:
    kind: str
    name: str
    model: Callable[[], nn.Module] = Net
    optimizer: Callable[[nn.Module], Any] = lambda model: torch.optim.AdamW(model.parameters(), 1e-2)
    step: Callable[[Run, Tensor], None] = one_step
    more: Callable[[Run], None] = nothing
    late: bool = False
    """Whether `more` runs only after attach, and after resume."""
    refused: str = ""
    """The reason for which rollback is not armed for it; empty if everything is restored."""


def plain(kind: str, **options: Any) -> Callable[[nn.Module], Any]:
    return lambda model: getattr(torch.optim, kind)(model.parameters(), **options)


def muon(model: nn.Module) -> list[Any]:
    matrices = [p for p in model.parameters() if p.ndim == 2]
    return [torch.optim.Muon(matrices, 1e-2), torch.optim.AdamW([p for p in model.parameters() if p.ndim != 2], 1e-2)]


def sparse(model: nn.Module) -> list[Any]:
    table = [p for name, p in model.named_parameters() if "table" in name]
    rest = [p for name, p in model.named_parameters() if "table" not in name]
    return [torch.optim.SparseAdam(table, 1e-2), torch.optim.AdamW(rest, 1e-2)]


def around(kind: Any) -> Callable[[nn.Module], Any]:
    return lambda model: kind(torch.optim.AdamW(model.parameters(), 1e-2))


def split(model: nn.Module) -> list[Any]:
    first, *rest = model.children()
    return [
        torch.optim.AdamW(first.parameters(), 1e-2),
        torch.optim.SGD([p for one in rest for p in one.parameters()], 1e-2, momentum=0.9),
    ]


def schedule(make: Callable[[Any], Any]) -> Callable[[Run], None]:
    def more(run: Run) -> None:
        run.schedulers += [made for one in run.watched for made in [make(one)]]

    return more


def two(run: Run) -> None:
    run.schedulers += [lr.StepLR(run.given, 4, 0.7), lr.ExponentialLR(run.given, 0.98)]


def scaled(run: Run) -> None:
    run.scaler = GradScaler("cpu", init_scale=1024.0, growth_interval=3)


def averaged(run: Run) -> None:
    run.average = AveragedModel(run.model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "LambdaLR": lambda o: lr.LambdaLR(o, lambda step: 0.97**step),
    "MultiplicativeLR": lambda o: lr.MultiplicativeLR(o, lambda step: 0.97),
    "StepLR": lambda o: lr.StepLR(o, 4, 0.5),
    "MultiStepLR": lambda o: lr.MultiStepLR(o, [3, 9], 0.5),
    "ConstantLR": lambda o: lr.ConstantLR(o, 0.5, 8),
    "LinearLR": lambda o: lr.LinearLR(o, 0.2, 1.0, 9),
    "ExponentialLR": lambda o: lr.ExponentialLR(o, 0.95),
    "PolynomialLR": lambda o: lr.PolynomialLR(o, 30),
    "CosineAnnealingLR": lambda o: lr.CosineAnnealingLR(o, 30),
    "CosineAnnealingWarmRestarts": lambda o: lr.CosineAnnealingWarmRestarts(o, 4),
    "CyclicLR": lambda o: lr.CyclicLR(o, 1e-3, 1e-2, 4, cycle_momentum=False),
    "OneCycleLR": lambda o: lr.OneCycleLR(o, 1e-2, 40),
    "ReduceLROnPlateau": lambda o: lr.ReduceLROnPlateau(o, patience=1),
    "SequentialLR": lambda o: lr.SequentialLR(o, [lr.LinearLR(o, 0.1, 1.0, 4), lr.CosineAnnealingLR(o, 20)], [4]),
    "ChainedScheduler": lambda o: lr.ChainedScheduler([lr.LinearLR(o, 0.1, 1.0, 4), lr.ExponentialLR(o, 0.98)]),
}
OPTIMIZERS: dict[str, Any] = {
    "Adadelta": {}, "Adafactor": {"lr": 1e-2}, "Adagrad": {"lr": 1e-2}, "Adam": {"lr": 1e-2, "amsgrad": True},
    "AdamW": {"lr": 1e-2}, "Adamax": {"lr": 1e-2}, "ASGD": {"lr": 1e-2}, "LBFGS": {"lr": 0.1, "max_iter": 3},
    "NAdam": {"lr": 1e-2}, "RAdam": {"lr": 1e-2}, "RMSprop": {"lr": 1e-3, "momentum": 0.5}, "Rprop": {"lr": 1e-3},
    "SGD": {"lr": 1e-2, "momentum": 0.9},
}  # fmt: skip
CASES = [
    *(Case("optimizer of torch.optim", name, optimizer=plain(name, **options)) for name, options in OPTIMIZERS.items()),
    Case("optimizer of torch.optim", "Muon, and AdamW beside it", optimizer=muon, step=all_step),
    Case(
        "optimizer of torch.optim", "SparseAdam, and AdamW beside it", lambda: Net(Numbers()), sparse, step=all_step
    ),
    Case("optimizer", "Lookahead, slow weights in `state`", optimizer=around(optimizers.LookaheadOfState)),
    Case("optimizer", "Lookahead, slow weights in attributes", optimizer=around(optimizers.LookaheadOfAttribute)),
    Case("optimizer", "a text and a `defaultdict` of its own", optimizer=lambda m: optimizers.Phased(m.parameters())),
    Case("optimizer", "schedule-free", optimizer=lambda m: optimizers.ScheduleFree(m.parameters()), step=swap_step),
    Case(
        "optimizer", "SAM", optimizer=lambda m: optimizers.Sam(m.parameters(), torch.optim.SGD, lr=1e-2),
    ),
    Case(
        "optimizer", "8-bit state in a tensor subclass", optimizer=lambda m: optimizers.EightBit(m.parameters()),
        refused="momentum is a TwoTensor, which cannot be kept in a snapshot",
    ),
    Case(
        "optimizer", "a number in its `state_dict` that is in no attribute",
        optimizer=lambda m: optimizers.LossScaled(m.parameters()),
        refused="has state that is not held: loss_scale, which its state_dict() shows",
    ),
    *(
        Case("scheduler", name, more=schedule(make), late=late)
        for name, make in SCHEDULERS.items()
        for late in (False, True)
    ),
    *(Case("scheduler", "two at once", more=two, late=late) for late in (False, True)),
    *(
        Case(
            "scheduler", "one of each of two optimizers", optimizer=split, step=all_step,
            more=schedule(lambda o: lr.CosineAnnealingLR(o, 30 if "momentum" in o.param_groups[0] else 20)), late=late,
        )
        for late in (False, True)
    ),
    *(Case("other", "GradScaler", more=scaled, late=late) for late in (False, True)),
    *(Case("other", "AveragedModel", more=averaged, late=late) for late in (False, True)),
    Case("model", "extra state", lambda: Net(Scaled())),
    Case("model", "mask of -inf that `forward` makes", lambda: Net(Masked(False))),
    Case("model", "the same, persistent", lambda: Net(Masked(True))),
    Case("model", "complex, 0-dimensional, sparse gradients", lambda: Net(Numbers()), sparse, step=all_step),
    Case("model", "weights written to by `.data` in `forward`", lambda: Net(Codebook())),
    Case(
        "model", "sparse buffer", lambda: _with_buffer(torch.eye(3).to_sparse()),
        refused="mask is a torch.sparse_coo, which cannot be kept in a snapshot",
    ),
    Case(
        "model", "quantized buffer", lambda: _with_buffer(_quantize(torch.eye(3))),
        refused="mask is a quantized tensor, which cannot be kept in a snapshot",
    ),
    Case(
        "model", "a `state_dict` that shows more than parameters and buffers", lambda: Net(Packed()),
        refused="has state that is not held: 3.seen, which its state_dict() shows",
    ),
]  # fmt: skip


def _with_buffer(tensor: Tensor) -> nn.Module:
    net = Net()
    net.register_buffer("mask", tensor)
    return net


def _quantize(tensor: Tensor) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch is about to remove this kind of tensor
        return torch.quantize_per_tensor(tensor, 0.1, 0, torch.qint8)


def named(case: Case) -> str:
    return f"{case.kind}, {case.name}{', late' if case.late else ''}"


HOLD = [case for case in CASES if not case.refused]
REFUSED = [case for case in CASES if case.refused]


@pytest.mark.sampled(8)
@pytest.mark.parametrize("case", HOLD, ids=named)
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step", "ignore:The epoch parameter in")
def test_rolled_back_in_memory(case: Case) -> None:
    rolled = Run(case)
    rolled.start(Rollback(every=5, keep=2, margin=5))
    for seq in range(END):
        if seq == AT:
            roll_back(rolled.restorer, at=AT, to=TO)  # type: ignore[arg-type]
        rolled.step(DATA[seq] * (50 if TO < seq <= AT else 1))
    assert [(answer.ok, answer.reason) for answer in of_type(rolled.sent, wire.RolledBack)] == [(True, "")]
    state = rolled.state()

    healthy = Run(case)
    healthy.start()
    for seq in range(END):
        if seq <= TO or seq > AT:
            # The first optimizer's step is undone when it returns: the rest of that iteration uses its own batch.
            healthy.seq = AT if seq == TO else seq
            healthy.second = DATA[AT] * 50 if seq == TO else None
            healthy.step(DATA[seq])
    assert_same(state, healthy.state())


@pytest.mark.sampled(8)
@pytest.mark.parametrize("case", HOLD, ids=named)
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step", "ignore:The epoch parameter in")
def test_resumed_from_disk(case: Case, tmp_path: Path) -> None:
    first = Run(case)
    first.start(Rollback(every=5, keep=2, margin=5, directory=tmp_path))
    for seq in range(8):
        first.step(DATA[seq])
    publish(first, TO)
    for seq in range(8, END):
        first.step(DATA[seq])
    expected = first.state()
    del first  # it belongs to another process
    gc.collect()

    again = Run(case)
    again.start(resume=tmp_path)
    for seq in range(TO + 1, END):
        again.step(DATA[seq])
    assert_same(again.state(), expected)


def test_each_optimizer_and_scheduler_of_torch_has_a_row() -> None:
    found = vars(torch.optim).values()
    kinds = {kind for kind in found if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)}
    rows = {case.name.partition(",")[0] for case in CASES if case.kind == "optimizer of torch.optim"}
    assert rows == {kind.__name__ for kind in kinds} - {"Optimizer"}
    assert SCHEDULERS.keys() == set(lr.__all__) - {"LRScheduler"}


def test_a_dead_scaler_of_an_earlier_run_is_not_taken() -> None:
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), 1e-2)
    gc.disable()
    try:
        earlier: list[Any] = [GradScaler("cpu")]
        earlier.append(earlier)  # so that only the garbage collector finds it
        del earlier
        assert Owners([net], [optimizer]).scaler is None
    finally:
        gc.enable()


def publish(run: Run, seq: int) -> None:
    assert run.restorer is not None
    run.restorer.receive(wire.Publish(id=1, seq=seq, step=seq, run="train", run_id="train-1", attempt=0))
    wait_for_disk(run.restorer)
    (answer,) = of_type(run.sent, wire.Published)
    assert answer.ok, answer.reason


@pytest.mark.parametrize("case", REFUSED, ids=named)
def test_refused_by_name(case: Case) -> None:
    run = Run(case)
    said: list[str] = []
    try:
        run.start(Rollback(every=5, keep=2, margin=5))
        assert run.restorer is not None
        for batch in DATA[:3]:
            run.step(batch)
    except StateError as error:
        said.append(str(error))
    said += run.disarmed
    assert len(said) == 1
    assert case.refused in said[0]


@pytest.mark.parametrize("switched", ["on", "off"])
def test_activation_checkpointing_switched_between_save_and_resume(switched: str, tmp_path: Path) -> None:
    def net(wrapped: bool) -> nn.Module:
        inner = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))
        return Net(checkpoint_wrapper(inner) if wrapped else inner)

    saving, going_on = (
        Case("model", "activation checkpointing", lambda wrapped=wrapped: net(wrapped))  # type: ignore[misc]
        for wrapped in (switched == "off", switched == "on")
    )
    first, again = Run(saving), Run(going_on)
    first.start(Rollback(every=5, keep=2, margin=5, directory=tmp_path))
    for seq in range(8):
        first.step(DATA[seq])
    publish(first, TO)
    for seq in range(8, END):
        first.step(DATA[seq])
    expected = first.state()
    again.start(resume=tmp_path)
    for seq in range(TO + 1, END):
        again.step(DATA[seq])
    assert_same(again.state(), expected)


@pytest.fixture
def group() -> Iterator[None]:
    """A process group of one rank, for DistributedDataParallel."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def compiled(module: nn.Module) -> nn.Module:
    return torch.compile(module, backend="eager")  # type: ignore[return-value]


WRAPPED: dict[str, Callable[[nn.Module], nn.Module]] = {
    "bare": lambda net: net,
    "DDP": DistributedDataParallel,
    "checkpointed": checkpoint_wrapper,
    "checkpointed in DDP": lambda net: DistributedDataParallel(checkpoint_wrapper(net)),
    "DDP, checkpointed": lambda net: checkpoint_wrapper(DistributedDataParallel(net)),
    "compiled in DDP": lambda net: DistributedDataParallel(compiled(net)),
    "DDP, compiled": lambda net: compiled(DistributedDataParallel(net)),
}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("later", WRAPPED)
@pytest.mark.parametrize("former", WRAPPED)
def test_names_on_disk_are_the_same_whatever_is_around_the_models(
    former: str, later: str, group: None, tmp_path: Path
) -> None:
    """Two models, as of a GAN: their names on disk begin with their classes. Also for buffers and extra state."""

    def made(name: str) -> tuple[list[nn.Module], list[nn.Module], torch.optim.Optimizer]:
        nets: list[nn.Module] = [nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), Scaled()) for _ in range(2)]
        models = [WRAPPED[name](net) for net in nets]
        return nets, models, torch.optim.SGD([p for one in models for p in one.parameters()], momentum=0.9)

    nets, models, optimizer = made(former)
    sent: list[Any] = []
    terms = Rollback(every=1, keep=2, margin=0, directory=tmp_path)
    restorer = Restorer(terms, models=models, optimizers=[optimizer], session=RecordingSession(sent=sent))
    for seq in range(2):
        nets[1](nets[0](DATA[seq][:, :4])).square().mean().backward()  # the wrappers have tests of their own
        optimizer.step()
        restorer.exit_step(seq, skipped=False)
        restorer.enter_step(seq + 1)
    restorer.receive(wire.Publish(id=1, seq=1, step=1, run="train", run_id="train-1", attempt=0))
    wait_for_disk(restorer)
    restorer.close()
    nets_again, models, optimizer_again = made(later)
    assert sentinel.resume(models, optimizer_again, directory=tmp_path) == 2
    for net, again in zip(nets, nets_again, strict=True):
        assert_same(again.state_dict(), net.state_dict())
    assert_same(optimizer_again.state_dict(), optimizer.state_dict())


RANKS = (("on 2 ranks", "ZeroRedundancyOptimizer under DDP"), ("on 2 and 4 ranks", "DDP, FSDP2; HSDP on 2 x 2"))
"""Rows of the table that test_sharded_state.py and test_ranks.py check."""


def make_table() -> str:
    """Return the table of docs/rollback.md, in Markdown."""
    rows: dict[tuple[str, str], list[Case]] = {}
    for case in CASES:
        rows.setdefault((case.kind, case.name), []).append(case)
    lines = ["| kind | what | memory | disk |", "| --- | --- | --- | --- |"]
    for (kind, name), cases in rows.items():
        late = " (made before or after `attach`)" if any(case.late for case in cases) else ""
        verdict = f"refused: {cases[0].refused} | refused" if cases[0].refused else "exact | exact"
        lines.append(f"| {kind} | {name}{late} | {verdict} |")
    lines.append("| model | activation checkpointing switched on or off between save and resume | - | exact |")
    lines += [f"| {kind} | {name} | exact | exact |" for kind, name in RANKS]
    return "\n".join(lines) + "\n"
