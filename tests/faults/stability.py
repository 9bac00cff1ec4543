"""Faults: losses and gradients that go wrong."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sentinel.hooks.core.governor import RARE_STEPS
from tests.faults.fault import Fault, Trial
from tests.faults.models import Reader, classifier, deep, images, passages, read_loss


def garbage(trial: Trial) -> None:
    """S1: 20 batches of another scale, with wrong labels, at a harmful learning rate."""
    model = classifier(256)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    trial.attach(model, optimizer)
    for (step, on), (x, y) in zip(trial.steps(260, 200), images(trial.seed), strict=False):
        if on and step < 220:
            x, y = x * 50, torch.zeros_like(y)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


def zeroed_state(trial: Trial) -> None:
    """C2: something sets the optimizer's second moments to 0. The healthy twin loads a state, which replaces them."""
    model = classifier(256)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    trial.attach(model, optimizer)
    for (step, on), (x, y) in zip(trial.steps(400, 200), images(trial.seed), strict=False):
        if step == 200:
            if on:
                for state in optimizer.state.values():
                    state["exp_avg_sq"].zero_()
            else:
                optimizer.load_state_dict(optimizer.state_dict())
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


class Wavy(nn.Module):
    """A classifier that also returns the mean of its hidden features, for a small and steep term of the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.head = classifier(), nn.Linear(10, 10)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.trunk(x)
        return self.head(hidden), hidden.mean()


def steep_term(trial: Trial) -> None:
    """S2: a term of the loss of at most 0.01, with a slope of 100. Clipping keeps the loss from rising."""
    model = Wavy()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    trial.attach(model, optimizer)
    for (_, on), (x, y) in zip(trial.steps(220, 200), images(trial.seed), strict=False):
        output, mean = model(x)
        loss = F.cross_entropy(output, y)
        if on:
            loss = loss + 0.01 * torch.sin(1e4 * mean)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


def rate_jumps(trial: Trial, shows_at: int = 401) -> None:
    """S3: the schedule jumps to 250 times the rate at step 400, and stays there."""
    model = classifier()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    trial.attach(model, optimizer)
    for (step, _), (x, y) in zip(trial.steps(460, shows_at), images(trial.seed), strict=False):
        if trial.faulty and step >= 400:  # a step's loss is computed before its update, and so changes at the next step
            optimizer.param_groups[0]["lr"] = 0.5
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


def rate_itself(trial: Trial) -> None:
    """S3: the jump of `rate_jumps`, found by the learning rate itself, which changes at the step of the jump."""
    rate_jumps(trial, shows_at=400)


def labels_mixed(trial: Trial) -> None:
    """S3: from a step on, labels do not belong to their images."""
    model = classifier()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    trial.attach(model, optimizer)
    for (_, on), (x, y) in zip(trial.steps(460, 400), images(trial.seed), strict=False):
        if on:
            y = y[torch.randperm(len(y))]
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


ROUND = 256
"""Steps between two samples of signals that change slowly."""


def one_huge_gradient(trial: Trial) -> None:
    """S4: one gradient of 100,000 times its size, as from a broken all-reduce.

    Adam's step is hardly larger for it, but its second moment contains it for a thousand steps.
    """
    hidden = (
        nn.Linear(64, 64),
        nn.Tanh(),
        nn.Linear(64, 64),
        nn.Tanh(),
    )  # tanh: the weights of a ReLU that is off would not be affected
    model = nn.Sequential(*hidden, nn.Linear(64, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    trial.attach(model, optimizer)
    onset = 20 * ROUND - 60
    for (step, _), (x, y) in zip(trial.steps(onset + 4 * RARE_STEPS, onset), images(trial.seed), strict=False):
        loss = F.cross_entropy(model(x + 0.3 * torch.randn_like(x)), y)
        optimizer.zero_grad()
        loss.backward()
        if trial.faulty and step == onset:
            torch._foreach_mul_([parameter.grad for parameter in model.parameters()], 1e5)
        optimizer.step()


class Residual(nn.Module):
    """A layer with a normalisation before it, and a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(32), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.relu(self.linear(self.norm(x)))


def trained_deep(trial: Trial, depth: int, gain: float) -> None:
    """Train a deep network without residual connections; the twin is as deep, and has one around each layer."""
    model = deep(depth, gain, normed=False)
    if not trial.faulty:
        model = nn.Sequential(nn.Linear(64, 32), *(Residual() for _ in range(depth)), nn.Linear(32, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    trial.attach(model, optimizer)
    for (_, _), (x, y) in zip(trial.steps(100), images(trial.seed), strict=False):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


def vanishing(trial: Trial) -> None:
    """S5: a gain of 0.6 in each of 24 layers."""
    trained_deep(trial, 22, 0.6)


def exploding(trial: Trial) -> None:
    """S5: a gain of 3 in each of 42 layers: tanh bounds activations, but not gradients."""
    trained_deep(trial, 40, 3.0)


def no_warmup(trial: Trial) -> None:
    """S6: a Post-LN transformer of 12 layers at a rate of 3e-3 from the first step on."""
    model = Reader(12, post_norm=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=1e-3, total_iters=1 if trial.faulty else 400)
    if trial.faulty:
        warmup.step()
    trial.attach(model, optimizer)
    for (_, _), rows in zip(trial.steps(60), passages(trial.seed, 8), strict=False):
        optimizer.zero_grad()
        read_loss(model, rows).backward()
        optimizer.step()
        warmup.step()


def tiny_rate(trial: Trial) -> None:
    """S8: a learning rate with a wrong exponent."""
    model = classifier()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-9 if trial.faulty else 1e-3)
    trial.attach(model, optimizer)
    for (_, _), (x, y) in zip(trial.steps(1100), images(trial.seed), strict=False):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


def dead_relu(trial: Trial) -> None:
    """S9: a bias of -100 before a ReLU, as a step with a huge rate leaves it."""
    model = classifier(depth=3)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    trial.attach(model, optimizer)
    for (step, on), (x, y) in zip(trial.steps(5 * ROUND + 10, 2), images(trial.seed), strict=False):
        if on and step == 2:
            with torch.no_grad():
                model[2].bias.fill_(-100.0)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


def starved(trial: Trial) -> None:
    """S10: adapters (PEFT) with a rate that is ten thousand times too small."""
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(Reader(), LoraConfig(r=4, target_modules=["qkv", "project"]))  # type: ignore[arg-type]
    adapters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(adapters, lr=1e-7 if trial.faulty else 1e-3)
    trial.attach(model, optimizer)
    for (_, _), rows in zip(trial.steps(2 * ROUND + 10), passages(trial.seed, 8), strict=False):
        optimizer.zero_grad()
        read_loss(model, rows).backward()
        optimizer.step()


def low_limit(trial: Trial) -> None:
    """S11: a clipping limit far below the usual gradient norm."""
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    trial.attach(model, optimizer)
    for (_, on), (x, y) in zip(trial.steps(900, 600), images(trial.seed), strict=False):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3 if on else 10.0)
        optimizer.step()


FAULTS = (
    Fault(
        id="S1", what="bad batches at a rate that does harm", alert="LossSpike", signal="loss", delay=4,
        loop=garbage, every_step=True, cause="^the batch of step ONSET", names=("steps? ONSET", "layer"),
        begins=True,
    ),
    Fault(
        id="S2", what="a small and steep term of the loss", alert="GradientSpike", signal="grad_norm", delay=2,
        loop=steep_term, cause="comes in right after trunk.4", names=("trunk.4.weight",),
        begins=True,
    ),
    Fault(
        id="S3", what="a rate that jumps", alert="Divergence", signal="loss", delay=30,
        loop=rate_jumps, cause="learning rate: it jumped from 0.002 to 0.5", names=("since step NEAR",),
        begins=True,
    ),
    Fault(
        id="S3 rate", what="a rate that jumps, by the rate itself", alert="LearningRateJump", signal="learning_rate",
        delay=1, loop=rate_itself, cause="it jumped from 0.002 to 0.5 (at step NEAR|AROUND)", names=("group",),
        begins=True,
    ),
    Fault(
        id="S3 labels", what="labels that belong to other images", alert="Divergence", signal="loss", delay=30,
        loop=labels_mixed, cause="data are others since step NEAR", names=("labels",),
        begins=True,
    ),
    Fault(
        id="S4", what="one huge gradient", alert="OptimizerStateCorrupt", signal="update_ratio", delay=10,
        loop=one_huge_gradient, names=("second moment",),
        cause="a gradient of norm .* at step 5060|second moments of Adam grew .*x (between|by) step",
    ),
    Fault(
        id="C2", what="second moments that are zeroed", alert="OptimizerStateLost", signal="second_moment_kept",
        delay=5,
        loop=zeroed_state, cause="zeroed or overwritten AROUND", names=("optimizer.state",),
        begins=True,
    ),
    Fault(
        id="S5 vanishing", what="a gain of 0.6 in 24 layers", alert="VanishingGradient", signal="grad_norm", delay=20,
        loop=vanishing, cause="vanishes with depth: from 4\\d.weight to 0.weight", names=("residual", "gain of 1"),
    ),
    Fault(
        id="S5 exploding", what="a gain of 3 in 42 layers", alert="ExplodingGradient", signal="grad_norm", delay=20,
        loop=exploding, cause="grows with depth: from 81.weight to 0.weight", names=("Pre-LN", "initialise"),
    ),
    Fault(
        id="S6", what="Post-LN without a warm-up", alert="WarmupMissing", signal="gradient_depth_ratio", delay=20,
        loop=no_warmup, cause="Post-LN .23 normalisations.*full height of 0.003", names=("warm-up", "norm_first=True"),
    ),
    Fault(
        id="S8", what="a rate whose exponent is wrong", alert="LossNotDecreasing", signal="loss", delay=1000,
        loop=tiny_rate, cause="rate is too small", names=("gradient norm", "parameter tensors move"),
    ),
    Fault(
        id="S9", what="a ReLU that is off", alert="DeadLayer", signal="layer_grad_norm", delay=50,
        loop=dead_relu, cause="input of 4 is always 0.* behind 2", names=("2\\.weight",),
        begins=True,
    ),
    Fault(
        id="S10", what="adapters at too small a rate", alert="AdapterStarved", signal="adapter_ratio", delay=100,
        loop=starved, cause="rate is too small: at 1e-07 the B of 4 adapters of rank 4 .project, qkv.",
        names=("spectrum of B A .*: [1-4]\\.\\d directions",),
    ),
    Fault(
        id="S11", what="a limit far under the usual norm", alert="AlwaysClipping", signal="grad_norm", delay=200,
        loop=low_limit, cause="limit of 0.001 lies under the usual", names=("20 of the last 20",),
        begins=True,
    ),
)  # fmt: skip
