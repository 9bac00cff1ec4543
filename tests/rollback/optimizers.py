"""Optimizers as users write them, each modelled on a well-known public design."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.testing._internal.two_tensor import TwoTensor


class LookaheadOfState(torch.optim.Optimizer):
    """Lookahead (Zhang and others, 2019) that does not call the base's __init__.

    It keeps slow weights in a `state` of its own, which its `state_dict` shows under another name.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, k: int = 3, alpha: float = 0.5) -> None:
        self.optimizer, self.k, self.alpha = optimizer, k, alpha
        self.param_groups = optimizer.param_groups
        self.state = defaultdict(dict)
        for group in self.param_groups:
            group["counter"] = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = self.optimizer.step(closure)
        for group in self.param_groups:
            group["counter"] += 1
            if group["counter"] % self.k == 0:
                for parameter in group["params"]:
                    state = self.state[parameter]
                    slow = state.setdefault("slow", parameter.detach().clone())
                    slow += (parameter.data - slow) * self.alpha
                    parameter.data.copy_(slow)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        fast = self.optimizer.state_dict()
        return {**fast, "slow_state": {id(key): value for key, value in self.state.items()}}


class LookaheadOfAttribute(torch.optim.Optimizer):
    """Lookahead with slow weights and a counter in attributes, which no `state_dict` shows."""

    def __init__(self, base: torch.optim.Optimizer, k: int = 3, alpha: float = 0.5) -> None:
        super().__init__([{"params": group["params"]} for group in base.param_groups], {"lr": 0.0})
        self.base, self.k, self.alpha, self.calls = base, k, alpha, 0
        self.param_groups = base.param_groups
        self.slow = [[p.detach().clone() for p in group["params"]] for group in self.param_groups]

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = self.base.step(closure)
        self.calls += 1
        if self.calls % self.k == 0:
            for group, slow in zip(self.param_groups, self.slow, strict=True):
                for fast, kept in zip(group["params"], slow, strict=True):
                    kept.lerp_(fast, self.alpha)
                    fast.data.copy_(kept)
        return loss


class Phased(torch.optim.Optimizer):
    """Optimizer with phases, named by a string attribute; its state counts the steps of each in a defaultdict."""

    def __init__(self, params: Iterable[Tensor], lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr})
        self.phase = "warm-up"

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                counts = self.state[parameter].setdefault("counts", defaultdict(int))
                counts[self.phase] += 1
                parameter.sub_(parameter.grad, alpha=group["lr"] * len(self.phase))
        self.phase = ("warm-up", "main", "decay")[sum(counts.values()) // 3 % 3]


class LossScaled(torch.optim.SGD):
    """SGD whose `state_dict` shows a number that another object keeps, as fairseq's FP16Optimizer does."""

    def __init__(self, params: Iterable[Tensor]) -> None:
        super().__init__(params, 1e-2)
        self.scaler = SimpleNamespace(loss_scale=128.0)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "loss_scale": self.scaler.loss_scale}


class ScheduleFree(torch.optim.Optimizer):
    """SGD without a schedule (Defazio and others, 2024).

    The weights for training and for evaluation differ, and `train` and `eval` swap them.
    """

    def __init__(self, params: Iterable[Tensor], lr: float = 0.05, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta, "k": 0, "train_mode": True})

    def _swap(self, mode: bool) -> None:
        for group in self.param_groups:
            if group["train_mode"] is not mode:
                weight = 1 - group["beta"] if mode else 1 - 1 / group["beta"]
                for parameter in group["params"]:
                    if "z" in self.state[parameter]:
                        parameter.data.lerp_(self.state[parameter]["z"], weight)
                group["train_mode"] = mode

    def train(self) -> None:
        self._swap(True)

    def eval(self) -> None:
        self._swap(False)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            assert group["train_mode"], "call train() first"
            group["k"] += 1
            for y in group["params"]:
                if y.grad is not None:
                    z = self.state[y].setdefault("z", y.detach().clone())
                    y.lerp_(z, 1 / group["k"]).sub_(y.grad, alpha=group["lr"] * (group["beta"] * (1 - 1 / group["k"])))
                    z.sub_(y.grad, alpha=group["lr"])


class EightBit(torch.optim.Optimizer):
    """Keeps its momentum in a tensor made of other tensors: here of two tensors, elsewhere of codes and scales."""

    def __init__(self, params: Iterable[Tensor], lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if "momentum" not in state:
                    state["momentum"] = TwoTensor(torch.zeros_like(parameter), torch.zeros_like(parameter))
                if parameter.grad is not None:
                    state["momentum"].a.mul_(0.9).add_(parameter.grad)
                    parameter.sub_(state["momentum"].a, alpha=group["lr"])


class Sam(torch.optim.Optimizer):
    """Sharpness-aware minimisation (Foret and others, 2021): each step moves the weights, and moves them back."""

    def __init__(self, params: Iterable[Tensor], base: Callable[..., torch.optim.Optimizer], **more: Any) -> None:
        super().__init__(params, {"rho": 0.05, **more})
        self.base_optimizer = base(self.param_groups, **more)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def first_step(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.state[parameter]["old"] = parameter.detach().clone()
                    parameter.add_(parameter.grad, alpha=group["rho"])
        self.zero_grad()

    @torch.no_grad()
    def second_step(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.data = self.state[parameter]["old"]
        self.base_optimizer.step()

    def step(self, closure: Any = None) -> None:
        closure = torch.enable_grad()(closure)
        self.first_step()
        closure()
        self.second_step()
