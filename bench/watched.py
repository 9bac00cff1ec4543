"""The loops of bench/watchers.py, and what watches them: Sentinel, its peers, and code as users write it themselves.

Each function takes a loop and puts a watcher in: calls before and after the optimizer's step, or a step of its own.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from bench.overhead import EVERYTHING, Loop

DECIDED = {"small": 150, "gpt": 24, "wide": 24}
"""Steps after which the governor has chosen its spacings."""


class Watched(Loop):
    """A loop with places for a watcher's calls, and a clock of their CPU time."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.own = 0.0
        """CPU seconds of the watcher's calls so far."""
        self.before: Callable[[], object] = lambda: None
        """Called when the gradients are complete."""
        self.after: Callable[[float], object] = lambda loss: None
        """Called with the loss when the step is over."""
        self.also: list[int] = []
        """Pids of processes that the watcher started and that are not children of this one."""
        self.end: Callable[[], object] = lambda: None

    def step(self) -> None:
        import torch

        loss = (self.model(self._batch) - torch.randn(self._shape)).square().mean()
        loss.backward()
        begin = time.thread_time()
        self.before()
        between = time.thread_time()
        self.optimizer.step()
        resumed = time.thread_time()
        self.after(loss)
        self.own += between - begin + time.thread_time() - resumed


def bare(loop: Watched) -> None:
    """Leave the loop unwatched."""


def clip(loop: Watched) -> None:
    """Call `clip_grad_norm_`, as many loops do anyway."""
    import torch

    parameters = list(loop.model.parameters())
    loop.before = lambda: torch.nn.utils.clip_grad_norm_(parameters, 1.0)


def naive(loop: Watched) -> None:
    """Take three numbers per parameter, each by `.item()`, as users often write it."""
    import torch

    parameters = list(loop.model.named_parameters())
    found: dict[str, tuple[float, float, float]] = {}

    def measure() -> None:
        for name, parameter in parameters:
            magnitudes = parameter.grad.detach().abs()
            smallest = torch.where(magnitudes > 0, magnitudes, torch.inf).min().item()
            found[name] = parameter.grad.norm().item(), magnitudes.max().item(), smallest

    loop.before = measure


def sentinel_everything(loop: Watched, overhead_share: float = EVERYTHING) -> None:
    """Watch by Sentinel with every statistic at every step, or at another `overhead`."""
    import sentinel
    from sentinel.cli.client import ask_daemons
    from sentinel.hooks.session import registry
    from sentinel.hooks.step import optimizer_monitor

    optimizer_monitor.time = SimpleNamespace(perf_counter=time.thread_time, time=time.time)  # type: ignore[attr-defined]
    monitor = sentinel.attach(loop.model, loop.optimizer, run=f"peers-{loop.name}", overhead=overhead_share)
    governor = registry.find_session([loop.optimizer]).governor  # type: ignore[union-attr]
    until = time.monotonic() + 8  # the daemon starts, and the governor decides for the first time
    while time.monotonic() < until or governor._counted < DECIDED[loop.name]:
        loop.block(1)
    loop.also = [ask_daemons("status")[0]["pid"]]
    begin = governor.hook_seconds
    loop.after = lambda _: setattr(loop, "own", governor.hook_seconds - begin)
    loop.end = monitor.detach


def sentinel_fallback(loop: Watched) -> None:
    """Watch by Sentinel with every statistic at every step, without the compiled kernel."""
    from sentinel.hooks.measure import kernels

    kernels.kernel_missing = "left out"
    sentinel_everything(loop)


def sentinel_default(loop: Watched) -> None:
    """Watch by Sentinel as installed: costly statistics as often as an overhead of 1 % allows."""
    sentinel_everything(loop, 0.01)


def wandb_watch(loop: Watched) -> None:
    """Watch by wandb.watch(log="gradients", log_freq=1), offline."""
    import wandb
    from wandb.integration.torch import wandb_torch

    timed = wandb_torch.TorchHistory.log_tensor_stats

    def measure(*arguments: Any) -> None:
        begin = time.thread_time()
        timed(*arguments)
        loop.own += time.thread_time() - begin

    wandb_torch.TorchHistory.log_tensor_stats = measure
    run = wandb.init(project="peers", mode="offline", settings=wandb.Settings(silent=True))
    run.watch(loop.model, log="gradients", log_freq=1)
    loop.after = lambda loss: run.log({"loss": loss.detach()})
    loop.end = run.finish


def traceml(loop: Watched) -> None:
    """Watch by traceml-ai as its guide says: `traceml run`, init and trace_step. It sees no gradients."""
    import traceml_ai

    traceml_ai.init(mode="auto")
    step = loop.step

    def traced() -> None:
        with traceml_ai.trace_step(loop.model):
            step()

    loop.step = traced  # type: ignore[method-assign]


def cockpit(loop: Watched) -> None:
    """Watch by cockpit's smallest configuration, "economy", at every step. It needs the loss as a module."""
    import torch
    from backpack import extend
    from cockpit import Cockpit
    from cockpit.utils.configuration import configuration

    extend(loop.model)
    mean = extend(torch.nn.MSELoss())
    each = torch.nn.MSELoss(reduction="none")
    watcher = Cockpit(loop.model.parameters(), quantities=configuration("economy"))
    number = 0

    def step() -> None:
        nonlocal number
        target = torch.randn(loop._shape)
        output = loop.model(loop._batch)
        loss, losses = mean(output, target), each(output, target).flatten(1).mean(1)
        info = {"batch_size": len(target), "individual_losses": losses, "loss": loss, "optimizer": loop.optimizer}
        with watcher(number, info=info):
            loss.backward(create_graph=watcher.create_graph(number))
        loop.optimizer.step()
        number += 1

    loop.step = step  # type: ignore[method-assign]
    loop.step()


def smdebug(loop: Watched) -> None:
    """Watch by SageMaker Debugger's hook: norms, minima and maxima of all gradients at every step, to disk."""
    from smdebug.pytorch import Hook, ReductionConfig, SaveConfig

    directory = tempfile.mkdtemp(prefix="smdebug-")
    hook = Hook(
        out_dir=f"{directory}/out",
        save_config=SaveConfig(save_interval=1),
        include_collections=["gradients"],
        reduction_config=ReductionConfig(norms=["l2"], reductions=["min", "max"]),
    )
    hook.register_module(loop.model)
    loop.end = hook.close


VARIANTS: dict[str, tuple[Callable[[Watched], None], str, str]] = {
    "bare": (bare, "", ""),
    "sentinel, all at every step": (
        sentinel_everything,
        "sentinel",
        "loss, times; norm, min, max, non-finite a layer",
    ),
    "the same, no compiled kernel": (sentinel_fallback, "sentinel", "the same"),
    "sentinel as installed": (sentinel_default, "sentinel", "the same, spaced by the governor"),
    "clip_grad_norm_": (clip, "", "the total norm"),
    "naive loop": (naive, "", "norm, largest and smallest magnitude a layer"),
    "wandb.watch": (wandb_watch, "wandb", "histograms of gradients"),
    "traceml-ai": (traceml, "traceml_ai", "times, memory; no gradients"),
    "cockpit": (cockpit, "cockpit", "gradient statistics, histogram, tests of noise"),
    "smdebug": (smdebug, "smdebug", "norm, min, max a layer, to disk"),
}
"""Name -> (function that puts it in, package that it needs, what it gives)."""
