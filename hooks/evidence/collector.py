"""Collects evidence of a step for an incident: where a non-finite value came from, and the optimizer's second moments.

    pre-hook of the optimizer: loss or gradient is not finite -> its batch runs again (`nonfinite_origin.py`) -> daemon

This is done before the update is applied, once for each incident, or when the daemon asks. A GradScaler withholds such
steps, and in a healthy run does so now and then: these are looked into only when the daemon asks.

Adam's second moment is a running mean of squared gradients. If one huge gradient is in it, its root is far above the
present gradients, and the layer's updates are smaller by that factor for 1/(1 - beta2) steps. It is read from a strided
sample.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from sentinel import wire
from sentinel.hooks.evidence.nonfinite_origin import NAMES, trace_origin
from sentinel.hooks.evidence.object_growth import ObjectGrowth
from sentinel.hooks.evidence.recent_batches import RecentBatches
from sentinel.hooks.loop.forward_passes import CallSlot
from sentinel.hooks.measure.probe import Step
from sentinel.hooks.measure.probes.weights import second_moment
from sentinel.hooks.torch_interop.layer_table import Layers, local
from sentinel.hooks.torch_interop.tensors import Sample, is_finite, row_length
from sentinel.signals import EXPONENTS
from sentinel.text import format_count
from sentinel.wire.evidence import Moment, Moments, Provenance

PAUSE_STEPS = 1000
"""Steps without a trace after one, unless the daemon asks: a dead run is not looked into at every step."""
MOST_TRACES = 8
"""The most traces in one process, unless the daemon asks for more."""
_TELLING = ("grad_norm", "grad_norm_applied")


class EvidenceCollector:
    """Collects what the daemon asks for, and looks into non-finite values by itself. One for all optimizers of a run.

    All methods but `ask` are called on the training thread.
    """

    def __init__(self, slots: Sequence[CallSlot], send: Callable[[wire.Message], None]) -> None:
        """`slots`: the last call of each model."""
        self.provenance_asked = False
        """Whether the origin of a non-finite value was asked for and not answered yet."""
        self.moments_asked = False
        """Whether the next step's gradients and second moments were asked for."""
        self.object_growth = ObjectGrowth(slots, send)
        self._slots: list[CallSlot] = list(slots)
        self._recent = RecentBatches()
        self._send = send
        self._not_before = 0
        self._traces = 0
        self._waited = False
        """Whether the present question was already a reason to wait for a device."""

    def ask(self, what: str) -> bool:
        """Collect evidence that the daemon asks for. Returns False if it is none that is collected here.

        `what`: the origin of a non-finite value (`provenance`), in the next step that is not finite, withheld or not;
        the next step's gradients and second moments (`moments`); which objects grow (`census`). May be called on any
        thread.
        """
        match what:
            case "provenance":
                self._waited, self.provenance_asked = False, True
            case "moments":
                self.moments_asked = True
            case "census":
                self.object_growth.ask()
            case _:
                return False
        return True

    def freeze_batch(self) -> None:
        """Keep the present micro-batch, as a backward pass from a non-finite loss is over: it is the one at fault."""
        for slot in self._slots:
            slot.frozen = slot.kept is not None

    def start_over(self) -> None:
        """Drop the batch that was kept as being at fault, as the passes of this step so far were thrown away."""
        for slot in self._slots:
            slot.calls = 0
            if slot.frozen:
                slot.release()
                slot.frozen = False

    def look(self, step: Step, *, withheld: bool, exact: bool) -> None:
        """Trace the step's non-finite values, once its gradients are complete. `exact`: the update has not been
        applied."""
        if self.moments_asked and step.parameters is not None and not withheld and not step.parameters.stream:
            self._tell_moments(step.optimizer, step.parameters, step.seq)
        loss_finite = is_finite(step.totals.loss)
        broken = withheld or not loss_finite or (step.values and _is_broken(step))
        if not broken and self.provenance_asked and not self._waited:
            loss_finite, broken = self._read_step(step)
        if not broken:
            return
        if not self.provenance_asked and (withheld or step.seq < self._not_before or self._traces >= MOST_TRACES):
            return
        self.provenance_asked, self._waited, self._not_before = False, False, step.seq + PAUSE_STEPS
        self._traces += 1
        found = [self._trace_slot(slot, step, loss_finite) for slot in self._slots if slot.model() is not None]
        if found:
            worst = min(found, key=_telling)
            self._tell(self._find_bad_data(worst) or (worst if exact else _inexact(worst)))

    def hold_batch(self, seq: int, read_loss: Callable[[], float | None]) -> None:
        """Hold the batch of a finished step whose loss is on a device (`recent_batches.py`). Not for a run with several
        models."""
        if len(self._slots) == 1 and (call := self._slots[0].kept) is not None:
            self._recent.add(seq, read_loss, call)

    def _find_bad_data(self, found: Provenance) -> Provenance | None:
        """Return what was bad in the first batch whose loss was not finite, if that was known too late to run it again.

        None: nothing in it would explain the loss.
        """
        if found.origin not in ("weights", "not known") or (bad := self._recent.find_bad_data()) is None:
            return None
        seq, names = bad
        return Provenance(
            seq=seq, origin="data", tensors=tuple(names[:NAMES]), inputs_finite=False, exact=False, rerun=False,
            bad_weights=found.bad_weights, bad_weight_count=found.bad_weight_count, seconds=found.seconds,
            missing=("the passes of that step: when its loss was known, its update had been applied",),
        )  # fmt: skip

    def _read_step(self, step: Step) -> tuple[bool, bool]:
        """Read the values of a step that are on a device. Returns (whether the loss is finite, whether any value is
        not).

        Once for each question: this waits for the device, and the loop is known to be broken already.
        """
        told = [step.totals.loss, *(step.values.get(name) for name in _TELLING)]
        values = [float(value) if isinstance(value, torch.Tensor) else value for value in told]
        self._waited = any(isinstance(value, torch.Tensor) for value in told)
        return is_finite(values[0]), not all(map(is_finite, values))

    def conclude(self, optimizer: Any, parameters: Layers, seq: int, *, broken: bool) -> None:
        """Send what the daemon asked for, from what is known, as the run ends after step `seq`. May be called again.

        `broken`: do not wait for a device.
        """
        there = not broken or all(p.device.type == "cpu" for _, p, _ in parameters.measured)
        if self.moments_asked and there:
            self._tell_moments(optimizer, parameters, seq)
        if self.object_growth.asked:
            self.object_growth.conclude()
        self.decline(seq)

    def decline(self, seq: int) -> None:
        """Answer that the run ended after step `seq`, so that what was asked for can no longer be found out."""
        if self.moments_asked:
            self.moments_asked = False
            missing = ("gradients and second moments: the run ended before they were looked at",)
            self._send_moments(Moments(seq=seq, missing=missing))
        self.object_growth.decline(seq)

    def _tell_moments(self, optimizer: Any, parameters: Layers, seq: int) -> None:
        self.moments_asked = False
        with torch.no_grad():
            self._send_moments(moments(optimizer, parameters, seq))

    def _send_moments(self, found: Moments) -> None:
        self._send(wire.Collected(what="moments", seq=found.seq, content=msgspec.to_builtins(found)))

    def close(self) -> None:
        """Release all batches, as no more evidence is needed; the model's hooks may stay."""
        self._recent.clear()
        slots, self._slots = self._slots, []
        for slot in slots:
            slot.close()

    def rewound(self) -> None:
        """Note that the run was rolled back: a later non-finite value is another incident."""
        self._not_before = 0
        self._recent.clear()

    def end_step(self, seq: int, *, first: bool) -> None:
        """Release the batch of a finished step of an optimizer.

        With several models it is kept until the next call replaces it, as another optimizer's step may need it.
        """
        if len(self._slots) == 1:
            slot = self._slots[0]
            slot.release()
            slot.frozen, slot.calls = False, 0
        else:
            for slot in self._slots:
                slot.frozen, slot.calls = False, 0
        if first and self.object_growth.asked:
            self.object_growth.advance(seq)

    def _trace_slot(self, slot: CallSlot, step: Step, loss_finite: bool) -> Provenance:
        model = slot.model()
        assert model is not None
        slot.running = True
        try:
            refuse_collectives = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
            found = trace_origin(
                model, slot.kept, step.seq, loss_finite=loss_finite, refuse_collectives=refuse_collectives
            )
        finally:
            slot.running = False
        if step.totals.backwards > 1 and found.origin == "nothing":
            missing = (
                *found.missing,
                f"the first {step.totals.backwards - 1} of {step.totals.backwards} micro-batches",
            )
            found = msgspec.structs.replace(found, origin="not known", missing=missing)
        others = slot.calls - max(step.totals.backwards, 1)
        if others > 0 and found.origin in ("loss", "nothing"):  # of the outputs, only the last call's were looked at
            missing = (*found.missing, f"{format_count(others, 'other call')} of the model in that step")
            found = msgspec.structs.replace(found, origin="not known", phase="", inputs_finite=None, missing=missing)
        return found

    def _tell(self, found: Provenance) -> None:
        self._send(wire.Collected(what="provenance", seq=found.seq, content=msgspec.to_builtins(found)))


def _is_broken(step: Step) -> bool:
    return not all(is_finite(step.values.get(name)) for name in _TELLING)


def _telling(found: Provenance) -> int:
    return ("data", "weights", "operation", "loss", "nothing", "not known").index(found.origin)


def _inexact(found: Provenance) -> Provenance:
    """Mark a finding as made after the update was applied: weights may have been broken by it, and not be at fault."""
    missing = ("the step with its closure had been applied before the batch could be run again",)
    origin = "not known" if found.origin == "weights" else found.origin
    return msgspec.structs.replace(found, origin=origin, exact=False, missing=(*found.missing, *missing))


SHOWN = 16


def moments(optimizer: Any, layers: Layers, seq: int) -> Moments:
    """Return the gradients and second moments of the present step, whose gradients are complete."""
    factors = _corrections(optimizer)
    rows = [
        (layers.table.layers[row].name, local(p.grad), _second(optimizer, p), factors.get(id(p), 1.0))
        for row, p, _ in layers.measured
        if p.grad is not None and not p.grad.is_sparse
    ]
    if not rows:
        return Moments(seq=seq, missing=("gradients: no parameter had one at that step",))
    scale = getattr(optimizer, "grad_scale", None)
    sample = Sample([gradient for _, gradient, _, _ in rows], row_length(len(rows)))
    if isinstance(scale, Tensor):
        sample.values /= scale.to(sample.values.device, torch.float32)
    sizes = sample.values.abs()
    counted = sizes[sizes > 0]
    below = torch.stack([(counted < 2.0**exponent).sum() for exponent in EXPONENTS]).tolist()
    gradients = (sizes.square().sum(1) / sample.counts).sqrt().tolist()
    held = [(place, second) for place, (_, _, second, _) in enumerate(rows) if second is not None]
    roots = dict(zip([place for place, _ in held], _roots([second for _, second in held]), strict=True))
    found = [
        Moment(layer=name, gradient=gradients[place], second=roots[place] * factor)
        for place, (name, _, _, factor) in enumerate(rows)
        if place in roots
    ]
    ratios = [one.ratio for one in found if math.isfinite(one.ratio) and one.ratio > 0]
    usual = statistics.median(ratios) if ratios else math.nan
    found.sort(key=lambda one: -one.ratio if math.isfinite(one.ratio) else -math.inf)
    total = max(int(counted.numel()), 1)
    return Moments(
        seq=seq, layers=tuple(found[:SHOWN]), usual=usual,
        exponents={str(exponent): n / total for exponent, n in zip(EXPONENTS, below, strict=True)},
        zero_share=1 - counted.numel() / max(int(sample.counts.sum()), 1),
        missing=() if found else (f"second moments: {type(optimizer).__name__} keeps none by element",),
    )  # fmt: skip


def _second(optimizer: Any, parameter: Any) -> Tensor | None:
    moment = second_moment(optimizer, parameter)
    return local(moment) if moment is not None and local(moment).numel() else None


def _roots(seconds: list[Tensor]) -> list[float]:
    if not seconds:
        return []
    sample = Sample(seconds, row_length(len(seconds)))
    found: list[float] = (sample.values.sum(1) / sample.counts).sqrt().tolist()
    return found


def _corrections(optimizer: Any) -> dict[int, float]:
    """Return, by id of a parameter, the factor with which Adam corrects the root in the first steps."""
    found = {}
    for group in optimizer.param_groups:
        beta = group.get("betas", (0.0, 0.0))[1]
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            steps = float(state["step"]) if isinstance(state, dict) and "step" in state else 0.0
            if steps and 0 < beta < 1:
                found[id(parameter)] = 1 / math.sqrt(1 - beta**steps)
    return found
