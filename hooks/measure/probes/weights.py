"""Measures what a step does to weights and optimizer state, whether replicas are equal, whether LoRA adapters learn.

Updates and checksums come from a strided sample (`hooks/torch_interop/tensors.py`): exact for small tensors, else
estimates.

    update            weight after the step less weight before
    update ratio      L2 norm of the update over that of the weight. About 1e-3 in a run that learns well; 0 in one
                      that learns nothing (A. Karpathy, CS231n: "ratio of weights:updates")
    lost update       the weight is the same after the step although its gradient is not 0: the update was less than
                      half of the weight's last digit, |update| < |weight| 2^-9 in bfloat16, and was rounded away
    exponents         cumulative histogram over all layers: the share of gradient elements under 2^-48, 2^-44 ... 1.
                      Under a loss scale S, fp16 rounds to 0 what is under 2^-25 / S and loses digits of what is under
                      2^-14 / S: one histogram answers for every scale
    checksum          replicas of a model (DDP) must have equal ones, and frozen parameters must keep theirs. Shards are
                      different by nature and are left out. Of trainable parameters, other places are sampled each
                      time, the same ones on all ranks
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch

from sentinel.hooks.measure.gradients import Gradients
from sentinel.hooks.measure.probe import Probe, Step
from sentinel.hooks.measure.probes.gradients import SMALLEST_NORMAL
from sentinel.hooks.torch_interop.layer_table import Layers, local
from sentinel.hooks.torch_interop.tensors import (
    Sample,
    checksum,
    on_one_device,
    row_length,
    scalar,
    send_numbers,
    short,
)
from sentinel.signals import EXPONENTS, below

_TINY = torch.finfo(torch.float32).tiny
"""Smallest divisor of a ratio to a norm: weights that are 0 and stay so have a ratio of 0."""


class WeightUpdates(Probe):
    """Samples weights before and after a step, and its gradients in between, for the statistics of tier 3."""

    tier = 3

    def __init__(self) -> None:
        self._before: tuple[tuple[tuple[int, torch.Tensor, bool], ...], Sample] | None = None
        self._size: torch.Tensor | None = None
        """Magnitudes of the sampled gradients; infinite for elements that are 0 or NaN."""

    def enter(self, step: Step) -> None:
        self._before = self._size = None
        if step.parameters is not None and (measured := step.parameters.measured):
            self._before = tuple(measured), Sample([local(p) for _, p, _ in measured], row_length(len(measured)))

    def before(self, step: Step) -> None:
        gradients = step.gradients
        if self._before is None or gradients is None or not gradients.tensors:
            return
        sample = Sample(gradients.tensors, row_length(len(self._before[0])))
        if gradients.scale is not None:
            sample.values /= gradients.scale.to(sample.values.device, torch.float32)
        size = sample.values.abs()
        size = self._size = torch.where(size > 0, size, torch.inf)  # 0 and NaN must not count as under a bound
        smallest = size.amin(1)
        # The scale is on the loss's device, which may be another one than the gradients'.
        sizes, scale = on_one_device((size, step.scale if step.scale is not None else 1.0))
        tiny = cast("torch.Tensor", sizes < SMALLEST_NORMAL / scale).count_nonzero(1)
        # The compiled kernel has counted all elements already, in its single read.
        whole = gradients.one_pass
        step.layers["layer_grad_zero_share"] = _zeros(gradients) if whole else sample.zeros() / sample.counts
        step.layers["layer_grad_smallest"] = (
            gradients.smallest if whole else torch.where(smallest < torch.inf, smallest, 0)
        )
        step.layers["layer_grad_tiny_share"] = tiny / sample.counts.to(tiny.device, non_blocking=True)
        for exponent in EXPONENTS:
            under = (size < 2.0**exponent).count_nonzero(1)
            step.values[below(exponent)] = scalar(sample.estimate_total(under) / sample.size)

    def after(self, step: Step) -> None:
        before, size = self._before, self._size
        self._before = self._size = None
        if before is None or size is None or step.gradients is None or step.is_withheld:
            return
        known, weights = before
        places = {row: place for place, (row, _, _) in enumerate(known)}
        chosen = [places[row] for row in step.gradients.rows if row in places]
        if len(chosen) < len(step.gradients.rows):  # the layer table changed within the step
            return
        after = Sample([local(known[place][1]) for place in chosen], size.shape[1])
        old = weights.values
        if len(chosen) < len(known):
            old = old.index_select(0, send_numbers(chosen, torch.int64, old.device))
        update = after.values - old
        moving = size < torch.inf
        lost, moving = (moving & (update == 0)).count_nonzero(1), moving.count_nonzero(1)
        norms = after.norms()
        moved = (update.square().sum(1) * after.weights).sqrt_()
        step.layers["layer_weight_norm"] = norms
        step.layers["layer_update_ratio"] = moved / norms.clamp(min=_TINY)
        step.layers["layer_lost_share"] = lost / moving.clamp(min=1)
        step.values["weight_norm"] = scalar(torch.linalg.vector_norm(norms))
        if step.parameters is not None and (own := step.parameters.find_shards(step.gradients.rows)) is not None:
            shards = norms[send_numbers(own, torch.int64, norms.device)]
            step.values["weight_norm_sharded"] = scalar(torch.linalg.vector_norm(shards))
        step.values["update_ratio"] = scalar(
            torch.linalg.vector_norm(moved) / torch.linalg.vector_norm(norms).clamp(min=_TINY)
        )
        step.values["lost_update_share"] = scalar(
            after.estimate_total(lost) / after.estimate_total(moving).clamp(min=1)
        )


def _zeros(gradients: Gradients) -> torch.Tensor:
    zeros = gradients.zeros
    return zeros / send_numbers([tensor.numel() for tensor in gradients.tensors], torch.float32, zeros.device)


_PARAMETERS, _ELEMENTS = 4, 512
"""Most parameters whose second moments are sampled, and elements of each."""
_EPSILON = 1e-8
"""Adam's default `eps`."""
_SLACK = 1e-30
"""Added to numerator and denominator of a ratio of second moments, so that it is 1 where both are 0."""


class _Kept(NamedTuple):
    """A parameter's second moment at the last sample."""

    moment: weakref.ref[torch.Tensor]
    """The tensor in the optimizer's state: if another one takes its place, the state was loaded or reset."""
    decay: float
    """Least factor by which one step multiplies the moment."""
    size: torch.Tensor
    """Sum over the moment's first elements."""


class _MomentSamples:
    """Second moments at a probe's last sample: some elements of four parameters show what happened to all."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Drop the last sample, so that the next one is compared with none."""
        self._known: dict[int, _Kept] = {}
        """Row of the layer table -> the sample."""

    def take(self, step: Step) -> list[tuple[_Kept, _Kept]]:
        """Return (last sample, sample of this step) for each parameter whose moments are still in the same tensor."""
        known, self._known = self._known, self._sample(step)
        return [
            (before, now)
            for row, now in self._known.items()
            if (before := known.get(row)) is not None and before.moment() is now.moment()
        ]

    def _sample(self, step: Step) -> dict[int, _Kept]:
        if step.parameters is None or not (measured := step.parameters.measured):
            return {}
        decays = _decays(step.optimizer)
        found: dict[int, _Kept] = {}
        for row, parameter, _ in _choose_parameters(measured):
            moment, decay = second_moment(step.optimizer, parameter), decays.get(id(parameter), 0.0)
            if moment is None or not 0 < decay < 1:
                continue
            if (values := _first_elements(moment)) is not None:
                found[row] = _Kept(weakref.ref(moment), decay, values.sum(dtype=torch.float32))
        devices = {kept.size.device for kept in found.values()}
        return found if len(devices) == 1 else {}


class SecondMoments(Probe):
    """`second_moment_kept`: least ratio of Adam's second moments to what decay alone leaves since the last sample.

    v <- beta2 v + (1 - beta2) g^2 leaves at least beta2 v (Kingma and Ba 2015, algorithm 1; RMSprop's alpha likewise):
    after n steps no less than beta2^n. A moment under that was changed by something else. Sampled before the step:
    after updates by lost moments, the next gradient may be so large that its square restores them.
    """

    tier = 2

    def __init__(self) -> None:
        self._samples = _MomentSamples()
        self._seq = -1
        """Sequence number of the step of the last sample."""
        self._updates = 0
        """Number of steps that were done at the last sample."""

    def forget(self) -> None:
        self._samples.forget()

    def before(self, step: Step) -> None:
        self._compare(step, step.seq)

    def after(self, step: Step) -> None:
        if self._seq != step.seq:  # there is no `before` for optimizers that stepped inside the backward pass
            self._compare(step, step.seq + 1)

    def _compare(self, step: Step, updates: int) -> None:
        steps, self._seq, self._updates = updates - self._updates, step.seq, updates
        kept = [
            (now.size + _SLACK) / (before.size * min(before.decay, now.decay) ** steps + _SLACK)
            for before, now in self._samples.take(step)
        ]
        if kept:
            step.values["second_moment_kept"] = scalar(torch.stack(kept).min())


class SecondMomentGrowth(Probe):
    """`second_moment_growth`: least ratio of Adam's second moments to those at the last sample of weight updates.

    One gradient of a thousand times the usual multiplies them by 1000 at a beta2 of 0.999, and updates are divided by
    the root of that until it has decayed.
    """

    tier = 3

    def __init__(self) -> None:
        self._samples = _MomentSamples()

    def forget(self) -> None:
        self._samples.forget()

    def after(self, step: Step) -> None:
        grown = [(now.size + _SLACK) / (before.size + _SLACK) for before, now in self._samples.take(step)]
        if grown:
            step.values["second_moment_growth"] = scalar(torch.stack(grown).min())


class LastUpdate(Probe):
    """`last_update_size`: root mean square of the last update over its learning rate, in elements of four parameters.

    Read from the state before the step: m / (sqrt(v) + eps) of Adam, with the correction of its first steps (Kingma and
    Ba 2015, algorithm 1), the momentum of SGD. Other optimizers do not keep their updates, and have no sample.
    Where a loss jumps, it tells a bad batch from a harmful update, though no gradient norm of the step before is known.
    """

    tier = 2

    def before(self, step: Step) -> None:
        if step.parameters is None:
            return
        chosen = [
            parameter
            for _, parameter, _ in _choose_parameters(step.parameters.measured)
            if first_moment(step.optimizer, parameter) is not None  # those that never had a gradient have none
        ]
        second = [second_moment(step.optimizer, parameter) for parameter in chosen]
        sizes = _join_elements([first_moment(step.optimizer, parameter) for parameter in chosen])
        if sizes is not None and any(moment is not None for moment in second):
            roots = _join_elements(second)
            sizes = sizes / (roots.sqrt() + _EPSILON) if roots is not None and roots.shape == sizes.shape else None
        if sizes is not None:
            step.values["last_update_size"] = scalar(sizes.square().mean().sqrt() * _correct_bias(step, chosen[0]))


def _choose_parameters(measured: Sequence[tuple[int, Any, Any]]) -> Sequence[tuple[int, Any, Any]]:
    """Return some parameters of the layer table, spread over the model."""
    return measured[:: max(1, len(measured) // _PARAMETERS)][:_PARAMETERS]


def _first_elements(state: torch.Tensor) -> torch.Tensor | None:
    """Return the first elements of this rank's part of a tensor; None if it has none that can be read in place."""
    values = local(state).detach()
    if not (values.is_contiguous() and values.numel() and values.is_floating_point()):
        return None
    return values.view(-1).narrow(0, 0, min(_ELEMENTS, values.numel()))


def _join_elements(states: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    """Return the first elements of tensors of one device in one tensor; None if any of them has none."""
    parts = [None if state is None else _first_elements(state) for state in states]
    found = [part.float() for part in parts if part is not None]
    alike = len(found) == len(parts) and len({part.device for part in found}) == 1
    return torch.cat(found) if alike else None


def _correct_bias(step: Step, parameter: Any) -> float:
    """Return the factor that corrects the bias of Adam's moments in its first steps; 1 for other optimizers.

    If Adam counts its steps on a device, the steps that we saw are taken.
    """
    betas, count = step.optimizer.param_groups[0].get("betas"), step.optimizer.state[parameter].get("step")
    if not (betas and all(isinstance(beta, float) for beta in betas)):
        return 1.0
    known = isinstance(count, int | float) or (isinstance(count, torch.Tensor) and count.device.type == "cpu")
    updates = max(float(count) if known else step.seq, 1)
    first, second = (1 - float(beta) ** updates for beta in betas[:2])
    return math.sqrt(second) / first


def first_moment(optimizer: Any, parameter: Any) -> torch.Tensor | None:
    """Return Adam's running mean of gradients or SGD's momentum from the optimizer's state; None if it has none."""
    state = optimizer.state.get(parameter, {})
    found = state.get("exp_avg", state.get("momentum_buffer")) if isinstance(state, dict) else None
    return found if isinstance(found, torch.Tensor) else None


def second_moment(optimizer: Any, parameter: Any) -> torch.Tensor | None:
    """Return Adam's or RMSprop's running mean of squared gradients from the optimizer's state; None if it has none."""
    state = optimizer.state.get(parameter, {})
    found = state.get("exp_avg_sq", state.get("square_avg")) if isinstance(state, dict) else None
    return found if isinstance(found, torch.Tensor) else None


def _decays(optimizer: Any) -> dict[int, float]:
    """Return id of parameter -> the factor by which a step decays its second moment, unless that is on a device."""
    found: dict[int, float] = {}
    for group in optimizer.param_groups:
        betas = group.get("betas")
        decay = betas[1] if betas else group.get("alpha", 0.0)
        if isinstance(decay, float):
            found |= dict.fromkeys(map(id, group["params"]), decay)
    return found


class Checksums(Probe):
    """Checksums of trainable and frozen parameters, integers under 2^24; and whether a frozen parameter has changed.

    A frozen parameter in the optimizer has no reason to change. A parameter in no optimizer may be a moving average of
    others: the two are counted apart.
    """

    tier = 3

    def __init__(self) -> None:
        self._known: tuple[tuple[int, ...], torch.Tensor] | None = None
        """Rows of the parameters that were frozen at the last look, and their checksums."""

    def enter(self, step: Step) -> None:
        """Read what was frozen since the last look before the step, which may still move it.

        Not where some of it is in no optimizer: a moving average moves after the step, which counts if it stood still.
        """
        frozen = step.parameters.list_frozen() if step.parameters is not None else []
        rows = tuple(row for row, _, _ in frozen)
        if frozen and all(held for _, _, held in frozen) and (self._known is None or self._known[0] != rows):
            self._known = rows, _sums([part for _, part, _ in frozen])

    def after(self, step: Step) -> None:
        known = step.parameters
        if known is None:
            return
        whole = {row: local(parameter) for row, parameter, _ in known.measured if row not in known.sharded}
        if whole:
            sums = _sums(list(whole.values()), step.seq)
            step.values["parameter_checksum"] = scalar(checksum(sums))
            if known.replicated:
                step.values["replica_checksum"] = step.values["parameter_checksum"]
                self._by_layer(step, list(whole), sums)
        if frozen := known.list_frozen():
            self._add_frozen(step, frozen)
        else:
            self._known = None

    def _by_layer(self, step: Step, rows: list[int], sums: torch.Tensor) -> None:
        """Add the checksums of the layers that have statistics at this step."""
        places = {row: place for place, row in enumerate(rows)}
        wanted = step.gradients.rows if step.gradients is not None else []
        if wanted and places.keys() >= set(wanted):  # else the layer table changed within the step
            chosen = send_numbers([places[row] for row in wanted], torch.int64, sums.device)
            step.layers["layer_checksum"] = short(sums[chosen])

    def _add_frozen(self, step: Step, frozen: list[tuple[int, torch.Tensor, bool]]) -> None:
        sums = _sums([part for _, part, _ in frozen])
        step.values["frozen_checksum"] = scalar(checksum(sums))
        rows = tuple(row for row, _, _ in frozen)
        before, self._known = self._known, (rows, sums)
        if before is None or before[0] != rows:  # other parameters were frozen then
            return
        changed = before[1] != sums
        own = send_numbers([held for _, _, held in frozen], torch.bool, changed.device)
        numbers = send_numbers(rows, torch.float32, changed.device)
        step.values["frozen_changed"] = scalar((changed & own).count_nonzero())
        step.values["frozen_moved"] = scalar((changed & ~own).count_nonzero())
        first = torch.where(changed, numbers, torch.inf).amin()
        step.values["frozen_changed_row"] = scalar(torch.where(changed.any(), first, -1.0))


def _sums(parameters: list[torch.Tensor], turn: int = 0) -> torch.Tensor:
    return Sample(parameters, row_length(len(parameters)), turn).checksums()


_LEAST_SIZE = 1e-30
_LOOKED_AT = 8
"""Most adapters whose spectrum is taken: each costs two products of r x r matrices with the sides of the layer."""


class LoraAdapters(Probe):
    """`adapter_ratio`: median over the adapters of the root mean square of B over that of A. No sample without any.

    `adapter_rank_used`: how many directions B A spreads its effect over, the participation ratio of its squared
    singular values s: (sum s)^2 / sum s^2, from 1 to the rank. Both sums are traces of products of r x r matrices, so
    no decomposition is needed, which would wait for the device.
    """

    tier = 2  # adapters are as small as their gradients, which tier 2 reads anyway

    def __init__(self) -> None:
        self._ids: frozenset[int] = frozenset()
        """Ids of the parameters among which the pairs were found."""
        self._pairs: list[tuple[Any, Any]] = []

    def after(self, step: Step) -> None:
        known = step.parameters
        if known is None:
            return
        if known.ids is not self._ids:
            self._ids, self._pairs = known.ids, _pairs(known)
        if self._pairs:
            parts = [local(one) for pair in self._pairs for one in pair]
            sizes = torch.stack([part.float().square().mean().sqrt() for part in parts]).reshape(-1, 2)
            step.values["adapter_rank_used"] = scalar(
                torch.stack([*map(_measure_rank, self._pairs[:_LOOKED_AT])]).median()
            )
            step.values["adapter_ratio"] = scalar((sizes[:, 1] / sizes[:, 0].clamp(min=_LEAST_SIZE)).median())


def _measure_rank(pair: tuple[Any, Any]) -> torch.Tensor:
    """Return the participation ratio for A (r, inputs) and B (outputs, r); 0 where B is 0."""
    a, b = (local(one).float() for one in pair)
    if a.dim() != 2 or b.dim() != 2 or a.shape[0] != b.shape[1]:  # an adapter of a convolution, or a shard
        return a.new_zeros(())
    size = b.square().mean().sqrt().clamp(min=_LEAST_SIZE)  # the fourth power of B itself would under- or overflow
    product = ((b / size).T @ (b / size)) @ (a @ a.T)
    total = product.diagonal().sum()
    return total.square() / (product * product.T).sum().clamp(min=_LEAST_SIZE)


def _pairs(known: Layers) -> list[tuple[Any, Any]]:
    """Return (A, B) of each adapter that trains, by PEFT's names."""
    named = {known.table.layers[row].name: p for row, p, _ in known.measured if p.requires_grad and local(p).numel()}
    found = [(a, named.get(name.replace("lora_A", "lora_B"))) for name, a in named.items() if "lora_A" in name]
    devices = {a.device for a, _ in found}
    return [(a, b) for a, b in found if b is not None] if len(devices) == 1 else []
