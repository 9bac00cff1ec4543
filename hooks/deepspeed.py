"""The integration with DeepSpeed: `attach` for what `deepspeed.initialize` returned, ZeRO stages 0 to 3.

    from sentinel.hooks.deepspeed import attach
    engine, *_ = deepspeed.initialize(model=model, config=config)
    monitor = attach(engine)

The steps are those of the engine's optimizer, at the boundaries of gradient accumulation. With ZeRO a rank measures the
part of each gradient that it keeps, when all is reduced and nothing is unscaled or clipped yet; the daemon puts the
parts together, without a collective here. The total norm is DeepSpeed's own. The loss is that of the backward pass.
There is no rollback: DeepSpeed keeps state that only DeepSpeed can restore, from its checkpoints.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from sentinel.errors import AttachError
from sentinel.hooks.loop import losses
from sentinel.hooks.loop.grad_clipping import Clip
from sentinel.hooks.measure.probe import Probe, Step
from sentinel.hooks.session import attach as attachment
from sentinel.hooks.session.monitor import Monitor
from sentinel.hooks.torch_interop.sharding import Partitioned
from sentinel.hooks.torch_interop.tensors import Scalar, to_scalar


def attach(engine: Any, **options: Any) -> Monitor:
    """Attach to a DeepSpeed engine. `options` are those of `sentinel.attach`.

    Raises what that raises, and AttachError for an engine without an optimizer, and for a rollback.
    """
    optimizer = getattr(engine, "optimizer", None)
    if not hasattr(optimizer, "step"):
        raise AttachError(f"attach(engine): the {type(engine).__name__} has no optimizer: give one to initialize()")
    if options.get("rollback") is not None:
        raise AttachError("attach(engine, rollback=...): DeepSpeed keeps state that Sentinel cannot restore: leave it")
    known: dict[str, Any] = {"loader": getattr(engine, "training_dataloader", None), "step": int(engine.global_steps)}
    steps = _steps_of(engine)
    return attachment.attach(steps.model, steps, **(known | options))


def _steps_of(engine: Any) -> Any:
    """Return the `Steps` of an engine: those of an earlier call, so that attaching twice is noticed, or new ones."""
    known = getattr(engine.optimizer.step, "sentinel_steps", None)
    if known is not None:
        return known
    kind = type(type(engine.optimizer).__name__, (Steps,), {})
    return kind(engine)


class Steps(torch.optim.Optimizer):
    """The steps of an engine's optimizer, which is not a torch optimizer, or one that steps once for each group.

    It replaces two methods of that optimizer, as long as it has hooks.
    """

    def __init__(self, engine: Any) -> None:  # not the base's __init__: the groups are the engine's
        self._engine = engine
        self.model: nn.Module = Partitioned(engine.module) if engine.zero_optimization() else engine.module
        self._optimizer_step_pre_hooks = OrderedDict()
        self._optimizer_step_post_hooks = OrderedDict()
        self._patched: list[tuple[Any, str, Any]] = []
        self.probes = [EngineScalars(engine)]

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        """The engine's groups, with the model's parameters in place of the flattened ones."""
        trained = [p for p in self.model.parameters() if p.requires_grad]
        groups = self._engine.optimizer.param_groups
        return [{**group, "params": trained if place == 0 else []} for place, group in enumerate(groups)]

    @property
    def state(self) -> Any:  # type: ignore[override]
        """State of the optimizer inside."""
        inner = self._engine.optimizer
        return getattr(inner, "optimizer", inner).state

    @property
    def cur_scale(self) -> float | None:
        """The loss scale; None if there is none."""
        if not self._engine.fp16_enabled():
            return None
        optimizer = self._engine.optimizer
        found = getattr(optimizer, "cur_scale", None)
        return float(optimizer.loss_scale if found is None else found)

    @property
    def grad_scale(self) -> torch.Tensor | None:
        """The factor that gradients are still multiplied by when the step begins."""
        return None if self.cur_scale is None else torch.tensor(self.cur_scale, dtype=torch.float32, device="cpu")

    def register_step_pre_hook(self, hook: Any) -> Any:
        """Register a hook as torch does. The first one puts the patches in place; removing the last one removes
        them."""
        self._patch()
        return _Handle(super().register_step_pre_hook(hook), self)

    def register_step_post_hook(self, hook: Any) -> Any:
        """Register a hook as torch does."""
        self._patch()
        return _Handle(super().register_step_post_hook(hook), self)

    def unpatch(self) -> None:
        """Remove the patches, if no hook is left. One that other code has patched over stays, and does nothing."""
        if self._optimizer_step_pre_hooks or self._optimizer_step_post_hooks:
            return
        for owner, name, wrapper in self._patched:
            if vars(owner).get(name) is wrapper:
                delattr(owner, name)
        self._patched.clear()

    def _patch(self) -> None:
        if not self._patched:
            self._replace("step", self._step)
            if hasattr(self._engine.optimizer, "scale_if_loss"):
                self._replace("scale_if_loss", self._scale)

    def _replace(self, name: str, make: Callable[[Any], Any]) -> None:
        owner = self._engine.optimizer
        wrapper = make(getattr(owner, name))
        self._patched.append((owner, name, wrapper))
        setattr(owner, name, wrapper)

    def _step(self, original: Any) -> Any:
        def step(*args: Any, **kwargs: Any) -> Any:
            for hook in list(self._optimizer_step_pre_hooks.values()):
                hook(self, (self, *args), kwargs)
            result = original(*args, **kwargs)
            for hook in list(self._optimizer_step_post_hooks.values()):
                hook(self, (self, *args), kwargs)
            return result

        step.sentinel_steps = self  # type: ignore[attr-defined]
        return step

    def _scale(self, original: Any) -> Any:
        def scale_if_loss(value: Any) -> Any:
            scaled = original(value)
            if isinstance(scaled, torch.Tensor) and scaled is not value and self._optimizer_step_pre_hooks:
                losses.remember(scaled, value)
            return scaled

        return scale_if_loss


class _Handle:
    def __init__(self, handle: Any, steps: Steps) -> None:
        self._handle, self._steps = handle, steps

    def remove(self) -> None:
        self._handle.remove()
        self._steps.unpatch()


class EngineScalars(Probe):
    """What DeepSpeed computes itself, at every step: the norm over all ranks, and whether the step was withheld."""

    tier = 0

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def before(self, step: Step) -> None:
        limit = float(self._engine.gradient_clipping())
        if limit > 0.0 and step.clip is None:
            step.clip = Clip(None, limit)  # the norm comes with the step; the present one is not the one applied

    def after(self, step: Step) -> None:
        values, optimizer = step.values, self._engine.optimizer
        if getattr(optimizer, "overflow", False):
            step.skipped = values["step_skipped"] = 1.0
            return
        norm = to_scalar(getattr(optimizer, "_global_grad_norm", None))
        if norm is None:
            return
        limit = float(self._engine.gradient_clipping())
        values["grad_norm"] = norm
        values["grad_norm_applied"] = norm if limit <= 0.0 else _least(norm, limit)
        if self._engine.zero_optimization():  # the norm is over the shards of all ranks already
            values["grad_norm_sharded"] = values["grad_norm_applied_sharded"] = 0.0


def _least(norm: Scalar, limit: float) -> Scalar:
    return norm.clamp(max=limit) if isinstance(norm, torch.Tensor) else min(norm, limit)
