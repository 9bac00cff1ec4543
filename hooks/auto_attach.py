"""Attaches without code in the script, if `sentinel run` started it: at the first backward pass or the first step.

The models are those that own the optimizer's parameters, found by one walk over all objects. Optimizers that exist by
then and have models belong to the same run (a GAN has two); one that is made later is a run of its own. An `attach` in
the script itself takes over.

At the first backward pass the loss of the first step can still be measured; rules compare with it. If there are several
optimizers, only the step shows which one leads; by then that loss is gone.
"""

from __future__ import annotations

import os
import weakref
from typing import Any

from torch import nn

from sentinel.hooks.core import faults
from sentinel.hooks.loop import patches
from sentinel.hooks.session import arguments, registry
from sentinel.hooks.session.attach import attach
from sentinel.hooks.torch_interop import discovery, tensors

_seen: weakref.WeakSet[Any] = weakref.WeakSet()
_forked = False


def attach_at_step(optimizer: Any) -> None:
    """Attach at the first step of an optimizer that no run watches. Called before every step of all; raises nothing."""
    try:
        if optimizer in _seen or _forked or tensors.is_capturing():
            return
        _seen.add(optimizer)
    except TypeError:  # one without a hash would look new at every step
        return
    with faults.swallow_faults("attaching at the first step", "unmonitored"):
        if registry.find_session([optimizer]) is None:
            _attach(optimizer)


def attach_at_backward() -> None:
    """Attach if there is exactly one optimizer, and no run watches it; raises nothing.

    Called before the first backward pass of the process.
    """
    if _forked or tensors.is_capturing():
        return
    with faults.swallow_faults("attaching at the first backward pass", "unmonitored until the first step"):
        optimizers, modules = discovery.trainers()
        hashed = [one for one in optimizers if type(one).__hash__ is not None and one not in _seen]
        if len(hashed) != 1 or registry.find_session([*optimizers]) or discovery.engine_of(hashed[0]) is not None:
            return
        if owners := discovery.owners(hashed[0], modules):
            attach(owners, hashed)
            _seen.update(hashed)
            _mark(hashed)
            if (session := registry.find_session(hashed)) is not None:
                session.expect_trial_passes()
            for scaler in discovery.bystanders(hashed)[0]:
                patches.note_scaled(scaler)


def _attach(first: Any) -> None:
    engine = discovery.engine_of(first)
    if engine is not None:
        from sentinel.hooks import deepspeed

        deepspeed.attach(engine)
        _mark([engine.optimizer.step.sentinel_steps])
        return
    optimizers, modules = discovery.trainers()
    others = [
        one for one in optimizers if one is not first and one not in _seen and registry.find_session([one]) is None
    ]
    models: dict[int, nn.Module] = {}
    watched = []
    for optimizer in (first, *others):
        owners = discovery.owners(optimizer, modules)
        if owners:
            watched.append(optimizer)
            models.update({id(owner): owner for owner in owners})
        elif optimizer is first:
            if trained := discovery.list_unsteered(modules):
                why = arguments.describe_strangers(first, trained)
            else:
                why = f"the parameters of {type(first).__name__} are in no torch.nn.Module that can be found"
            faults.say(f"{why}. Training goes on unmonitored")
            return
    _seen.update(watched)
    attach(list(models.values()), watched)
    _mark(watched)


def _mark(watched: list[Any]) -> None:
    session = registry.find_session(watched)
    if session is not None:
        session.unasked = True


def _fork() -> None:
    """Attach no more in a forked child: it is not the run."""
    global _forked
    _forked = True


os.register_at_fork(after_in_child=_fork)
