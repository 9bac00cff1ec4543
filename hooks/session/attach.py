"""`sentinel.attach`: checks what it is given, puts the hooks in place, and returns without waiting for anything."""

from __future__ import annotations

import functools
import os
import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import TYPE_CHECKING, Any, Never

from torch import nn

from sentinel.errors import AttachError, RollbackError, StateError
from sentinel.hooks.core import faults
from sentinel.hooks.core.governor import OVERHEAD, OVERHEAD_GPU, Governor
from sentinel.hooks.core.identity import RunIdentity, place, spans_nodes
from sentinel.hooks.core.opening import Opening
from sentinel.hooks.evidence.collector import EvidenceCollector
from sentinel.hooks.loop import forward_passes
from sentinel.hooks.loop.batches import Batches
from sentinel.hooks.loop.forward_passes import CallSlot
from sentinel.hooks.loop.losses import EngineLossScale
from sentinel.hooks.loop.step_accumulator import StepAccumulator
from sentinel.hooks.measure import probe, probes
from sentinel.hooks.measure.kernels import device_kernel
from sentinel.hooks.measure.probe import Probes
from sentinel.hooks.measure.probes.loop import LrSchedule
from sentinel.hooks.rollback import framework_checkpoints
from sentinel.hooks.rollback.options import Rollback
from sentinel.hooks.rollback.step_guard import StepGuard
from sentinel.hooks.session import arguments, registry
from sentinel.hooks.session.arguments import facts, gpus
from sentinel.hooks.session.backward_passes import Succession
from sentinel.hooks.session.logged_signals import KINDS
from sentinel.hooks.session.monitor import Monitor
from sentinel.hooks.session.session import RunSession
from sentinel.hooks.step.optimizer_in_backward import BackwardGathering, OptimizersInBackward, WholeStep
from sentinel.hooks.step.optimizer_monitor import OptimizerMonitor
from sentinel.hooks.torch_interop import discovery, sharding
from sentinel.hooks.torch_interop.layer_table import Layers, wrappers
from sentinel.hooks.transport.daemon_launcher import DaemonLocator
from sentinel.node import paths

if TYPE_CHECKING:
    from sentinel.hooks.rollback.restorer import Restorer


@arguments.refuse_unknown
def attach(
    model: nn.Module | Sequence[nn.Module],
    optimizer: Any,
    *unnamed: Never,
    scaler: Any = None,
    scheduler: Any = None,
    loader: Any = None,
    run: str | None = None,
    step: int | None = None,
    total_steps: int | None = None,
    rollback: Rollback | None = None,
    stop_on: Sequence[str] = (),
    overhead: float | None = None,
    provenance: bool = True,
    kind: str | None = None,
    config: str | os.PathLike[str] | None = None,
    address: str | None = None,
) -> Monitor:
    """Watch a training run. Call it once, before the loop; the loop stays as it is.

    `model` may be wrapped (DDP, FSDP2, torch.compile): pass the object that the loop calls. `optimizer` is one, or
    several, or a wrapper that has it as `.optimizer`. `scaler` and `scheduler` are needed for rollback only, and found
    where they are not given; `loader` lets a rollback skip batches. `run` names the run; `step` is your number of the
    next step, where that is not 0, and `total_steps` the planned number of all steps, so that the page says how long
    the run will still take. `stop_on` names alerts that end the run, as if their rules had the action `stop`
    (docs/stop.md). `overhead` is the share of the loop's time that the statistics may take; without it, 0.02 on the CPU
    and 0.01 on a GPU, the gradient norm at every step where it alone costs at most half of that, and in the first 64
    steps as much as it takes to look at all of them, at most half of their time. With `provenance` the batch of a step
    is held until its end, and run once more where loss or gradients are not finite: the alert then names the module
    that produced the first such value. `kind` is "rl" or "supervised": how losses are judged (docs/loops.md); without
    it, by what is logged. `address` (`unix:/path`) is that of a running daemon; without it the node's daemon is used,
    or one is started in the background. `config` is the settings file of a daemon started here; without it, the one in
    force (docs/alerts.md).

    Raises AttachError where model and optimizer cannot be watched, or are already; RollbackError where the snapshots do
    not fit into memory. A problem of the machine (no socket directory, no daemon) is reported in a line on stderr, and
    training goes on unmonitored.
    """
    if os.environ.get("SENTINEL_DISABLED", "0") not in ("", "0"):
        return Monitor(run or "", None, why="disabled by SENTINEL_DISABLED")
    models, optimizers = arguments.models_of(model), arguments.optimizers_of(optimizer)
    arguments.refuse_unnamed(unnamed)
    arguments.check(models, optimizers)
    _check_options(run, step, total_steps, rollback, overhead, kind)
    _check_alerts(stop_on)
    served = paths.unix_path(address, f"attach(address={address!r})") if address is not None else None
    settings = _settings(config)
    _check_unwatched(optimizers)
    if sys.platform not in ("linux", "darwin"):
        faults.say(f"{sys.platform} is not supported; training goes on unmonitored")
        return Monitor(run or "", None, why=f"unmonitored: {sys.platform} is not supported")
    given = list(optimizer) if isinstance(optimizer, list | tuple) else [optimizer]
    try:
        models = discovery.replicating(models)
        setup = _Setup(
            models=models,
            optimizers=optimizers,
            given=given,
            scaler=scaler,
            scheduler=scheduler,
            loader=loader,
            rollback=rollback,
            provenance=provenance,
            overhead=overhead,
            kind=kind,
            address=served,
            settings=settings,
            total_steps=total_steps,
            stop_on=tuple(stop_on),
        )
        return setup.open_session(RunIdentity(run, registry.count_sessions()), step or 0)
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


def _check_options(
    run: object, step: object, total_steps: object, rollback: object, overhead: object, kind: object
) -> None:
    if run is not None and not (isinstance(run, str) and run.strip()):
        raise AttachError(f"attach(run={run!r}): the name of the run must be a text that is not empty")
    if step is not None and (not isinstance(step, int) or isinstance(step, bool) or step < 0):
        raise AttachError(f"attach(step={step!r}): your number of the next step must be a whole number from 0")
    if total_steps is not None and (not isinstance(total_steps, int) or total_steps < 1):
        raise AttachError(f"attach(total_steps={total_steps!r}): how many steps the run is to have, from 1")
    if rollback is not None and not isinstance(rollback, Rollback):
        raise AttachError(f"attach(rollback={rollback!r}): write rollback=sentinel.Rollback(...)")
    if overhead is not None and (not isinstance(overhead, int | float) or not 0 < overhead <= 1):
        raise AttachError(f"attach(overhead={overhead!r}): a share of the loop's time, over 0 and at most 1")
    if kind not in (None, *KINDS):
        raise AttachError(f"attach(kind={kind!r}): {' or '.join(map(repr, KINDS))}; leave it to have it recognised")


def _check_alerts(names: object) -> None:
    """Check their form only: whether such alerts exist, only the daemon knows."""
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) and name.isidentifier() for name in names):
        raise AttachError(f"attach(stop_on={names!r}): a list of names of alerts, like ['NonFiniteLoss']")


def _check_unwatched(optimizers: list[Any]) -> None:
    registry.let_go_of_the_dead(vars(sys.modules["__main__"]))
    while (session := registry.find_session(optimizers)) is not None:
        if session.unasked:
            registry.take_over(session)
        elif registry.interactive():  # the cell was run again
            registry.end(session)
        else:
            raise AttachError(
                f"this optimizer is watched already, as run {session.who.name!r}: "
                "attach once, or call detach() on the monitor that the first call returned"
            )


def _is_on_device(models: list[nn.Module]) -> bool:
    return any(not parameter.is_cpu for model in models for parameter in model.parameters())


@dataclass(kw_only=True)
class _Setup:
    """The checked arguments of `attach`, from which a session is made."""

    models: list[nn.Module]
    optimizers: list[Any]
    given: list[Any]
    """The optimizers as they were passed, with their wrappers."""
    scaler: Any
    scheduler: Any
    loader: Any
    rollback: Rollback | None
    provenance: bool
    overhead: float | None
    kind: str | None
    address: Path | None
    settings: Path | None
    total_steps: int | None
    stop_on: tuple[str, ...]

    def open_session(self, who: RunIdentity, step: int) -> Monitor:
        """Build the session, put all hooks in place, and announce it. Returns the monitor."""
        given, on_device = self.overhead, _is_on_device(self.models)
        if on_device:
            device_kernel.load()
        if given is None:
            governor = Governor(OVERHEAD_GPU if on_device else OVERHEAD, Opening(), norm_first=True)
        else:
            governor = Governor(given, Opening(given))
        accumulator = StepAccumulator()
        if step:
            accumulator.totals.logged["resumed"] = 1.0
        accumulator.loop_locator.begin(sys._getframe())
        daemon_locator = DaemonLocator(self.address, self.settings)
        session = RunSession(
            who,
            accumulator=accumulator,
            governor=governor,
            batches=Batches(accumulator, self.loader),
            daemon_locator=daemon_locator,
            kind=self.kind,
        )
        monitor = Monitor(who.name, session, step=step)
        try:
            self._fill(session, step, monitor)
        except BaseException:
            session.call_off()
            raise
        registry.add(session)
        if place()[0] == 0:  # once for all ranks
            armed, scaled = session.hello["rollback"] is not None, self._is_scaled()
            faults.say(_announcement(who.name, session.whole_hello, armed=armed, scaled=scaled))
            if stray := _list_stray(session.monitors):
                faults.say(arguments.warn_of_stray(stray))
        return monitor

    def _is_scaled(self) -> bool:
        """Whether a loss scaler is found now. One that the script makes later is seen as well."""
        kept = any(EngineLossScale(optimizer).found for optimizer in self.given)
        return self.scaler is not None or kept or bool(discovery.bystanders(self.optimizers)[0])

    def _fill(self, session: RunSession, step: int, monitor: Monitor) -> None:
        points: list[EntryPoint] = []
        try:
            points = probe.points()
        except OSError as error:  # e.g. no file descriptor left
            session.accumulator.unseen.lose("what other packages' probes measure", str(error.strerror))
        monitors = [self._make_monitor(index, session, points) for index in range(len(self.optimizers))]
        session.stop_on = self.stop_on
        restorer = self._restorer(session, step)
        guard = monitors[0].guard = restorer or StepGuard(session, step=step)
        description = facts(self.models, self.optimizers, self.loader, self.scaler, self.total_steps)
        if restorer is not None and restorer.terms.directory is not None and spans_nodes():
            from sentinel.hooks.session.resume_over_nodes import describe_sharing  # needed as rarely as the restorer

            description["parts_in"] = f"{restorer.terms.directory} ({describe_sharing()})"
        session.hello = {
            "step_offset": step,
            "facts": description,
            "unseen": (*self._unseen(monitors), *session.hello.get("unseen", ())),
            "gpus": gpus(self.models),
            "rollback": self.rollback.terms() if self.rollback is not None and restorer is not None else None,
            "supervisor": os.environ.get("SENTINEL_SUPERVISOR", ""),
            "resumes": framework_checkpoints.was_asked(),
        }
        for optimizer_monitor in monitors:
            optimizer_monitor.hook(session.handles)
        slots = [CallSlot(model) if self.provenance else None for model in self.models]
        for model, slot in zip(self.models, slots, strict=True):
            if not forward_passes.explain_no_hooks(model):
                forward_passes.watch(model, session.accumulator, slot, session.handles)
        collector = EvidenceCollector([slot for slot in slots if slot is not None], session.send)
        factory = _WholeStepFactory(self.models, session, points)
        gathering = BackwardGathering(self.optimizers, factory, session.governor)
        for optimizer_monitor in monitors:
            optimizer_monitor.within, optimizer_monitor.collector = gathering, collector
        succession = Succession(session, self.models, SessionSuccession(self, monitor, session).follow)
        session.begin(monitors, guard, restorer, gathering, collector, succession)

    def _make_monitor(self, index: int, session: RunSession, points: list[EntryPoint]) -> OptimizerMonitor:
        optimizer = self.optimizers[index]
        chosen = Probes(
            [*probes.stock(), LrSchedule(optimizer), *probe.load_probes(points), *getattr(optimizer, "probes", ())],
            session.accumulator.unseen,
        )  # an integration may have some
        session.signals.declare(chosen.signals)
        layers = Layers(index, self.models, optimizer)
        scale = EngineLossScale(self.given[index])
        return OptimizerMonitor(session, optimizer, layers, chosen, own_scale=scale if scale.found else None)

    def _restorer(self, session: RunSession, step: int) -> Restorer | None:
        if self.rollback is None:
            return None
        from sentinel.hooks.rollback.restorer import Restorer  # costs a megabyte in each process that loads it

        if any(sharding.is_flattened(module) for model in self.models for module in model.modules()):
            raise RollbackError("rollback: FullyShardedDataParallel (FSDP1) cannot be rolled back; fully_shard can")
        try:
            return Restorer(
                self.rollback,
                models=self.models,
                optimizers=self.optimizers,
                given=self.given,
                scaler=self.scaler,
                schedulers=self.scheduler,
                session=session,
                step=step,
            )
        except StateError as error:
            session.disarm(str(error))
            return None

    def _unseen(self, monitors: list[OptimizerMonitor]) -> list[str]:
        unseen = []
        if stray := _list_stray(monitors):
            unseen.append(arguments.describe_stray(stray))
        if any(name.startswith("FSDP") for model in self.models for name in wrappers(model)):
            unseen.append("how long collectives take (those of FSDP are not timed)")
        reasons = [reason for model in self.models if (reason := forward_passes.explain_no_hooks(model))]
        unseen += [f"forward passes ({reason})" for reason in dict.fromkeys(reasons)]
        if place()[1] > 1 and not any(one.layers.replicated or one.layers.sharded for one in monitors):
            unseen.append(
                "whether replicas drift apart (no DistributedDataParallel that holds all of the model is known)"
            )
        if len(monitors) > 1:
            unseen += [
                "which optimizer a loss belongs to, where several backward passes come before their steps",
                "faults of the optimizers after the first (rules judge the losses and gradients of the first one)",
            ]
        return unseen


class SessionSuccession:
    """Opens the session for an optimizer that took over the models from the watched one.

    It holds neither models nor optimizers, session nor monitor.
    """

    def __init__(self, setup: _Setup, monitor: Monitor, session: RunSession) -> None:
        """`setup`: the arguments of the present session, of which those remain that name no object of the script."""
        self._template = replace(
            setup, models=[], optimizers=[], given=[], scaler=None, scheduler=None, loader=None, rollback=None
        )
        self._models = [weakref.ref(model) for model in setup.models]
        self._monitor, self._session = weakref.ref(monitor), weakref.ref(session)

    def follow(self, optimizer: Any, missed_steps: int) -> None:
        """End the present session, and watch `optimizer` instead, unless another session does.

        `missed_steps`: number of its steps that were not seen.
        """
        former = self._session()
        if former is None or former.ended:
            return
        steps, restorer, guard, alerts = former.next_seq + missed_steps, former.restorer, former.guard, former.alerts
        on_alert = alerts.functions if alerts is not None else ()
        on_rollback = tuple(restorer.functions) if restorer is not None else ()
        on_stop = tuple(guard.last_functions) if guard is not None else ()
        watched = registry.find_session([optimizer]) is not None
        registry.succeed(former, optimizer)
        if watched:
            return
        setup = replace(
            self._template,
            models=[model for ref in self._models if (model := ref()) is not None],
            optimizers=[optimizer],
            given=[optimizer],
            rollback=restorer.terms if restorer is not None else None,
        )
        made = setup.open_session(former.who.again(), former.hello["step_offset"] + steps)
        for function in on_alert:
            made.on_alert(function)
        for rewind in on_rollback:
            made.after_rollback(functools.partial(_call_later, rewind, steps))
        for ending, seconds in on_stop:
            made.on_stop(ending, seconds=seconds)
        if (monitor := self._monitor()) is not None:
            monitor.follow(made)


def _call_later(function: Callable[[int, int], object], steps: int, to: int, at: int) -> object:
    """Call a function of an earlier session, which counted `steps` steps before the present one began at 0."""
    return function(to + steps, at + steps)


class _WholeStepFactory:
    """Makes the one monitor of optimizers that turn out to step inside the backward pass. Holds the models weakly."""

    def __init__(self, models: Sequence[nn.Module], session: RunSession, points: list[EntryPoint]) -> None:
        self._models, self._session, self._points = [weakref.ref(model) for model in models], session, points

    def make(self, optimizers: OptimizersInBackward) -> WholeStep:
        """Make the monitor."""
        chosen = Probes([*probes.stock(), *probe.load_probes(self._points)], self._session.accumulator.unseen)
        layers = Layers(0, [model for ref in self._models if (model := ref()) is not None], optimizers)
        return WholeStep(self._session, optimizers, layers, chosen)

    def take_over(self) -> None:
        """Let the session watch through the monitor."""
        self._session.gather()


def _list_stray(monitors: Iterable[OptimizerMonitor]) -> list[str]:
    return [name for one in monitors for name in one.layers.stray]


def _announcement(run: str, hello: dict[str, Any], *, armed: bool, scaled: bool) -> str:
    description, unseen = hello["facts"], hello["unseen"]
    text = (
        f"watching run {run!r}: {description['model']}, {_count(description['parameters'])} parameters in "
        f"{description['tensors']} tensors, {description['optimizer']}; "
        f"sees loss, rates, {'loss scale, ' * scaled}gradients by layer, times, memory"
    )
    if armed:
        text += "; rollback is armed" + (" once all nodes have met" if spans_nodes() else "")
        if "parts_in" in description:
            text += f"; each node writes its part of snapshots to {description['parts_in']}"
    if description["kernel_missing"]:
        text += f"; gradients cost more to read, without the compiled kernel ({description['kernel_missing']})"
    return text + (f"; does not see {'; '.join(unseen)}" if unseen else "")


def _count(number: int) -> str:
    for size, letter in ((1e9, " B"), (1e6, " M"), (1e3, " k")):
        if number >= size:
            return f"{number / size:.3g}{letter}"
    return str(number)
