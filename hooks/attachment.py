"""`sentinel.attach`: checks what it is given, puts the hooks in place, and returns without waiting for anything."""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from sentinel import places
from sentinel.errors import AttachError, RollbackError
from sentinel.hooks import checkpoints, faults, flat, forward, probe, probes, registry, search, targets
from sentinel.hooks.batches import Batches
from sentinel.hooks.dialer import Dialer
from sentinel.hooks.facts import facts, gpus
from sentinel.hooks.identity import Who, place
from sentinel.hooks.inbackward import Gathering, OptimizersInBackward, Whole
from sentinel.hooks.inquest import Inquest
from sentinel.hooks.kept import Slot
from sentinel.hooks.layers import Layers, wrappers
from sentinel.hooks.monitor import Monitor
from sentinel.hooks.ownscale import OwnScale
from sentinel.hooks.pacing import Pacing
from sentinel.hooks.probe import Probes
from sentinel.hooks.probes.schedule import Schedule
from sentinel.hooks.rollback_terms import Rollback
from sentinel.hooks.session import Session
from sentinel.hooks.stream import Stream
from sentinel.hooks.tally import Ledger

if TYPE_CHECKING:
    from sentinel.hooks.rollback import Restorer


def attach(
    model: nn.Module | Sequence[nn.Module],
    optimizer: Any,
    *,
    scaler: Any = None,
    scheduler: Any = None,
    loader: Any = None,
    run: str | None = None,
    step: int | None = None,
    rollback: Rollback | None = None,
    overhead: float = 0.01,
    provenance: bool = True,
    config: str | os.PathLike[str] | None = None,
    address: str | None = None,
) -> Monitor:
    """Watch a training run. Call it once, before the loop; the loop stays as it is.

    `model` may be wrapped (DDP, FSDP2, torch.compile): pass the object that the loop calls. `optimizer` is one, or
    several, or a wrapper that has it as `.optimizer`. `scaler` and `scheduler` are wanted by rollback alone, and found
    where they are not given; `loader` lets a rollback skip batches. `run` names the run; `step` is your number of the
    next step, where that is not 0. `overhead` is the share of the loop's time that the statistics may take. With
    `provenance` the batch of a step is held until its end, and run once more where loss or gradients are not finite:
    the alert then names the module that made it. `address`
    (`unix:/path`) is a daemon that serves; without it the node's is used, or one is started in the background. `config`
    is the settings file of one that is started; without it, the one in force (docs/alerts.md).

    Raises AttachError where model and optimizer cannot be watched, or are already; RollbackError where the snapshots
    do not fit into memory. What is wrong with the machine (no socket directory, no daemon) is said in a line on
    stderr, and training goes on unmonitored.
    """
    if os.environ.get("SENTINEL_DISABLED", "0") not in ("", "0"):
        return Monitor(run or "", None, why="disabled by SENTINEL_DISABLED")
    models, optimizers = targets.models_of(model), targets.optimizers_of(optimizer)
    targets.check(models, optimizers)
    _check_options(run, step, rollback, overhead)
    served = places.unix_path(address, "attach(address=)") if address is not None else None
    settings = _settings(config)
    _check_unwatched(optimizers)
    if sys.platform not in ("linux", "darwin"):
        faults.say(f"{sys.platform} is not supported; training goes on unmonitored")
        return Monitor(run or "", None, why=f"unmonitored: {sys.platform} is not supported")
    given = list(optimizer) if isinstance(optimizer, list | tuple) else [optimizer]
    try:
        scales = [OwnScale(one) for one in given]
        setup = _Setup(models, optimizers, scales, scaler, scheduler, loader, rollback, provenance)
        return setup.open_session(Who(run, registry.made()), step or 0, overhead, Dialer(served, settings))
    except (AttachError, RollbackError):
        raise
    except Exception:
        faults.swallow("attach", "unmonitored")
        return Monitor(run or "", None, why="unmonitored after an internal fault")


def _settings(config: str | os.PathLike[str] | None) -> Path | None:
    if config is None:
        return None
    path = Path(config).absolute()
    if not path.is_file():
        raise AttachError(f"attach(config={str(config)!r}): there is no such file; `sentinel init` writes one")
    return path


def _check_options(run: object, step: object, rollback: object, overhead: object) -> None:
    if run is not None and not (isinstance(run, str) and run.strip()):
        raise AttachError(f"attach(run={run!r}): the name of the run must be a text that is not empty")
    if step is not None and (not isinstance(step, int) or isinstance(step, bool) or step < 0):
        raise AttachError(f"attach(step={step!r}): your number of the next step must be a whole number from 0")
    if rollback is not None and not isinstance(rollback, Rollback):
        raise AttachError(f"attach(rollback={rollback!r}): write rollback=sentinel.Rollback(...)")
    if not isinstance(overhead, int | float) or not 0 < overhead <= 1:
        raise AttachError(f"attach(overhead={overhead!r}): a share of the loop's time, over 0 and at most 1")


def _check_unwatched(optimizers: list[Any]) -> None:
    registry.let_go_of_the_dead(vars(sys.modules["__main__"]))
    while (session := registry.of(optimizers)) is not None:
        if session.unasked:
            registry.take_over(session)
        elif registry.interactive():  # the cell was run again
            registry.end(session)
        else:
            raise AttachError(
                f"this optimizer is watched already, as run {session.who.name!r}: "
                "attach once, or call detach() on the monitor that the first call returned"
            )


@dataclass
class _Setup:
    """What is to be watched, checked."""

    models: list[nn.Module]
    optimizers: list[Any]
    own_scales: list[OwnScale]
    scaler: Any
    scheduler: Any
    loader: Any
    rollback: Rollback | None
    provenance: bool

    def open_session(self, who: Who, step: int, overhead: float, dialer: Dialer) -> Monitor:
        """Build the session, put everything in place, and say so."""
        ledger, pacing = Ledger(), Pacing(overhead)
        if step:
            ledger.tally.logged["resumed"] = 1.0
        ledger.whereabouts.begin(sys._getframe())
        session = Session(who, ledger=ledger, pacing=pacing, batches=Batches(ledger, self.loader), dialer=dialer)
        try:
            self._fill(session, step)
        except BaseException:
            session.call_off()
            raise
        registry.add(session)
        if place()[0] == 0:  # once for all ranks
            faults.say(_announcement(who.name, session.hello, armed=self.rollback is not None))
        return Monitor(who.name, session, step=step)

    def _fill(self, session: Session, step: int) -> None:
        points = probe.points()
        streams = [self._stream(index, session, points) for index in range(len(self.optimizers))]
        restorer = self._restorer(session, step)
        streams[0].guard = restorer
        session.hello = {
            "step_offset": step,
            "facts": facts(self.models, self.optimizers, self.loader, self.scaler),
            "unseen": tuple(self._unseen(streams, session)),
            "gpus": gpus(self.models),
            "rollback": self.rollback.terms() if self.rollback is not None else None,
            "supervisor": os.environ.get("SENTINEL_SUPERVISOR", ""),
            "resumes": checkpoints.asked(),
        }
        handles = [handle for stream in streams for handle in stream.hook()]
        slots = [Slot(model) if self.provenance else None for model in self.models]
        for model, slot in zip(self.models, slots, strict=True):
            if not isinstance(model, torch.jit.ScriptModule):
                handles += forward.watch(model, session.ledger, slot)
        inquest = Inquest([slot for slot in slots if slot is not None], session.send)
        gathering = Gathering(self.optimizers, _whole(self.models, session, points), session.pacing)
        for stream in streams:
            stream.within, stream.inquest = gathering, inquest
        session.begin(streams, handles, restorer, gathering, inquest)

    def _stream(self, index: int, session: Session, points: list[EntryPoint]) -> Stream:
        optimizer = self.optimizers[index]
        chosen = Probes(
            [*probes.stock(), Schedule(optimizer), *probe.installed(points), *getattr(optimizer, "probes", ())]
        )  # a door may have some
        session.declare(chosen.signals)
        layers = Layers(index, self.models, optimizer)
        return Stream(
            optimizer,
            layers,
            chosen,
            ledger=session.ledger,
            pacing=session.pacing,
            submit=session.submit,
            queued=session.sender.queue.records,
            own_scale=scale if (scale := self.own_scales[index]).found else None,
        )

    def _restorer(self, session: Session, step: int) -> Restorer | None:
        if self.rollback is None:
            return None
        from sentinel.hooks.rollback import Restorer  # a megabyte in each process that loads it

        if any(flat.is_flattened(module) for model in self.models for module in model.modules()):
            raise RollbackError("rollback: FullyShardedDataParallel (FSDP1) cannot be rolled back; fully_shard can")
        scaler, schedulers = search.completed(self.optimizers, self.scaler, self.scheduler, "attach")
        return Restorer(
            self.rollback,
            models=self.models,
            optimizers=self.optimizers,
            scaler=scaler,
            schedulers=schedulers,
            batches=session.batches,
            send=session.send,
            step=step,
            defer=session.ledger.defer,
        )

    def _unseen(self, streams: list[Stream], session: Session) -> list[str]:
        unseen = [f"hangs ({session.no_heartbeat})"] if session.no_heartbeat else []
        if stray := [name for stream in streams for name in stream.layers.stray]:
            unseen.append(f"names of {len(stray)} parameters that are in the optimizer and not in the model")
        if outside := targets.outside(self.models, self.optimizers):
            unseen.append(f"{len(outside)} parameters that train and are in no optimizer ({targets.listed(outside)})")
        if any(name.startswith("FSDP") for model in self.models for name in wrappers(model)):
            unseen.append("how long collectives take (nobody times those of FSDP)")
        if any(isinstance(model, torch.jit.ScriptModule) for model in self.models):
            unseen.append("forward passes (a ScriptModule takes no hooks)")
        if len(streams) > 1:
            unseen.append("which optimizer a loss belongs to, where several backward passes come before their steps")
        return unseen


def _whole(
    models: list[nn.Module], session: Session, points: list[EntryPoint]
) -> Callable[[OptimizersInBackward], Whole]:
    """Makes the one stream of optimizers that turn out to step inside the backward pass. Models are held weakly."""
    refs = [weakref.ref(model) for model in models]

    def make(optimizers: OptimizersInBackward) -> Whole:
        chosen = Probes([*probes.stock(), *probe.installed(points)])
        layers = Layers(0, [model for ref in refs if (model := ref()) is not None], optimizers)
        session.gather()
        return Whole(
            optimizers,
            layers,
            chosen,
            ledger=session.ledger,
            pacing=session.pacing,
            submit=session.submit,
            queued=session.sender.queue.records,
        )

    return make


def _announcement(run: str, hello: dict[str, Any], *, armed: bool) -> str:
    description, unseen = hello["facts"], hello["unseen"]
    text = (
        f"watching run {run!r}: {description['model']}, {_count(description['parameters'])} parameters in "
        f"{description['tensors']} tensors, {description['optimizer']}; "
        "sees loss, rates, loss scale, gradients by layer, times, memory"
    )
    if armed:
        text += "; rollback is armed"
    if description["kernel_missing"]:
        text += f"; gradients cost more to read, without the compiled kernel ({description['kernel_missing']})"
    return text + (f"; does not see {'; '.join(unseen)}" if unseen else "")


def _count(number: int) -> str:
    for size, letter in ((1e9, " B"), (1e6, " M"), (1e3, " k")):
        if number >= size:
            return f"{number / size:.3g}{letter}"
    return str(number)
