"""Checks that the non-finite origin is found on the device: in the tests' faults, and when an alert asks for it."""

from __future__ import annotations

import math
from collections.abc import Iterator

import msgspec
import torch

from bench.gpu_checks import Line
from bench.gpu_checks.loops import Loop, deterministic, same, toy
from bench.gpu_checks.watched import watched
from sentinel import wire
from sentinel.hooks.evidence.nonfinite_origin import trace_origin
from sentinel.hooks.loop.forward_passes import keep
from sentinel.wire.evidence import Provenance
from tests.hooks.faulty import Case, cases


def check(device: str) -> Iterator[Line]:
    made = list(cases())
    if device == "cuda":
        torch.set_default_device(device)  # for tensors that the faults themselves make
    wrong, seconds = [], 0.0
    for case in made:
        found = _check_trace(case, device)
        seconds = max(seconds, found.seconds)
        if (found.origin, found.phase, found.module) != (case.origin, case.phase, case.module):
            wrong.append(f"{case.name}: {found.origin} {found.phase} {found.module} {found.missing}")
    right = len(made) - len(wrong)
    said = "; ".join([f"{right} of {len(made)}", *wrong[:3]])
    yield Line("faults whose module is named", said, not wrong, str(len(made)))
    yield Line("the slowest of them", f"{seconds:.2f} s")
    torch.set_default_device(None)
    yield from _check_answer(device)


def _check_trace(case: Case, device: str) -> Provenance:
    """Trace one step of a case after its backward pass; return what was found."""
    model, batch = case.model.to(device), case.batch.to(device)
    torch.manual_seed(5)
    kept = keep((batch,), {})
    output = model(batch)
    kept.hold_gradients(output)
    loss = case.loss(output)
    loss.backward()
    return trace_origin(model, kept, 7, loss_finite=math.isfinite(loss.item()), refuse_collectives=False)


def _check_answer(device: str) -> Iterator[Line]:
    """Check a loop whose weights break: the daemon asks, a later step answers, and the run's results do not change."""
    deterministic()
    loops = []
    for ask in (False, True):
        loop = Loop(device, **toy(device), dropout=0.1)
        with watched(loop) as (daemon, monitor):
            loop.run(5)
            with torch.no_grad():
                loop.model.get_parameter("head.weight")[0, 0] = torch.nan
            if ask:
                daemon.wait(lambda served=daemon: served.of(wire.Hello))
                monitor._session.collector.ask("provenance")
            loop.run(4)
        loops.append(loop)
    told = [one.content for one in daemon.of(wire.Collected) if one.what == "provenance"]
    found = msgspec.convert(told[0], Provenance) if told else None
    said = f"{found.origin} {', '.join(found.tensors)}" if found else "nothing"
    yield Line("a weight that broke, when asked", said, said == "weights head.weight", "weights head.weight")
    alike = same(*loops)
    yield Line("the run after it", "the same to the bit" if alike else "different", alike, "bits")
