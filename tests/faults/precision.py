"""Faults: numbers out of the range or precision of their format, in real fp16 and bf16."""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.faults.fault import Fault, Trial
from tests.faults.models import classifier, device_type, images


def bad_batch(trial: Trial) -> None:
    """P1: a batch contains a NaN, as from a damaged file."""
    model = classifier()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    trial.attach(model, optimizer)
    for (_, on), (x, y) in zip(trial.steps(150, 120), images(trial.seed), strict=False):
        if on:
            x = x.clone()
            x[0, 0] = torch.nan
        with torch.autocast(device_type(), torch.bfloat16):
            output = model(x)
        optimizer.zero_grad()
        F.cross_entropy(output.float(), y).backward()
        optimizer.step()


class Normed(nn.Module):
    """Divides features by their length; without an epsilon under the root (`safe`) the derivative at 0 is infinite."""

    def __init__(self, safe: bool) -> None:
        super().__init__()
        self.lift, self.out, self.safe = nn.Linear(64, 32, bias=False), nn.Linear(32, 10), safe

    def forward(self, x: Tensor) -> Tensor:
        x = self.lift(x)
        squares = x.square().sum(-1, keepdim=True)
        length = (squares + 1e-6).sqrt() if self.safe else squares.sqrt()
        return self.out(x / (length + 1.0))


def blank_image(trial: Trial) -> None:
    """P1, in the backward pass: the square root of an image that is all black has an infinite derivative."""
    model = Normed(safe=not trial.faulty)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    trial.attach(model, optimizer)
    for (step, _), (x, y) in zip(trial.steps(150, 120), images(trial.seed), strict=False):
        if step >= 120:
            x = x.clone()
            x[0] = 0.0
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


class HalfUnit(nn.Module):
    """Normalises rows to length 1, with an epsilon that is 0 in fp16 and not in float32."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self.lift, self.out = nn.Linear(64, 32, bias=False), nn.Linear(32, 10)

    def forward(self, rows: Tensor) -> Tensor:
        x = self.lift(rows).to(self.dtype)
        with torch.autocast(device_type(), enabled=False):  # CUDA's would compute the root in float32
            unit = x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-8)
        return self.out(torch.where((rows == 0).all(-1, keepdim=True), 0.0, unit))


def collapsing(trial: Trial) -> None:
    """P2: blank rows, masked in the forward pass, give 0 / 0 in the backward pass: NaN, whatever the loss scale."""
    model = HalfUnit(torch.float16 if trial.faulty else torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler(device_type(), init_scale=2.0**12)
    trial.attach(model, optimizer, scaler=scaler)
    for (step, _), (x, y) in zip(trial.steps(220, 150), images(trial.seed), strict=False):
        if step >= 150:
            x = x.clone()
            x[0] = 0.0
        with torch.autocast(device_type(), torch.float16):
            loss = F.cross_entropy(model(x).float(), y)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


def unscaled(trial: Trial) -> None:
    """P3: fp16 autocast without loss scaling."""
    model = classifier()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler(device_type(), enabled=not trial.faulty)
    trial.attach(model, optimizer)
    for (_, _), (x, y) in zip(trial.steps(100), images(trial.seed), strict=False):
        with torch.autocast(device_type(), torch.float16):
            loss = F.cross_entropy(model(x).float(), y)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


def scaled_too_little(trial: Trial) -> None:
    """P4: a mean over 100,000 in the loss, and a loss scale of 1 that never grows."""
    model = classifier()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, eps=1e-12)
    scaler = torch.amp.GradScaler(device_type(), init_scale=1.0 if trial.faulty else 2.0**20, growth_interval=10**6)
    trial.attach(model, optimizer)
    for (_, _), (x, y) in zip(trial.steps(300), images(trial.seed), strict=False):
        with torch.autocast(device_type(), torch.float16):
            loss = F.cross_entropy(model(x).float(), y) / 1000
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


def pure_bf16(trial: Trial) -> None:
    """P5: bf16 weights with a rate at which updates are below their last digit. The twin's weights are in float32."""
    model = classifier()
    if trial.faulty:
        model.bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    trial.attach(model, optimizer)
    for (_, _), (x, y) in zip(trial.steps(300), images(trial.seed), strict=False):
        with torch.autocast(device_type(), torch.bfloat16, enabled=not trial.faulty):
            output = model(x.bfloat16() if trial.faulty else x)
        optimizer.zero_grad()
        F.cross_entropy(output.float(), y).backward()
        optimizer.step()


def clipped_first(trial: Trial) -> None:
    """P6: gradients are clipped before they are unscaled."""
    model = classifier()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler(device_type())
    trial.attach(model, optimizer)
    for (_, on), (x, y) in zip(trial.steps(200, 50), images(trial.seed), strict=False):
        with torch.autocast(device_type(), torch.float16):
            loss = F.cross_entropy(model(x).float(), y)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        if not on:
            scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()


def summed_in_bf16(trial: Trial) -> None:
    """P7: the gradients of 16 passes per step are added up in bf16. The twin's parameters are in float32."""
    model = classifier()
    if trial.faulty:
        model.bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-1)
    trial.attach(model, optimizer)
    batches = images(trial.seed, 16)
    for _, _ in trial.steps(40):
        optimizer.zero_grad()
        for x, y in itertools.islice(batches, 16):
            with torch.autocast(device_type(), torch.bfloat16, enabled=not trial.faulty):
                output = model(x.bfloat16() if trial.faulty else x)
            (F.cross_entropy(output.float(), y) / 16).backward()
        optimizer.step()


FAULTS = (
    Fault(
        id="P1", what="a NaN in a batch, under bf16 autocast", alert="NonFiniteLoss", signal="loss", delay=0,
        loop=bad_batch, cause="bad data: .* of the batch of step ONSET",
        begins=True,
    ),
    Fault(
        id="P1 backward", what="an infinite derivative at 0", alert="NonFiniteGradient", signal="grad_norm", delay=0,
        loop=blank_image, cause="in the backward pass of step ONSET: .* in SqrtBackward0 at .*precision.py",
        late_cause="the backward pass of step ONSET made it",
        names=("from finite inputs and weights", "lift.weight"),
        begins=True,
    ),
    Fault(
        id="P2", what="0 / 0 in fp16 at every step", alert="ScalerCollapse", signal="loss_scale", delay=8,
        loop=collapsing, cause="the model, whatever the batch", names=("of the last \\d+ steps were withheld", "lift"),
        begins=True,
    ),
    Fault(
        id="P3", what="fp16 without a GradScaler", alert="ScalerMissing", signal="fp16", delay=20,
        loop=unscaled, cause="neither a GradScaler nor", names=("% are 0", "0\\.weight"),
    ),
    Fault(
        id="P4", what="a loss scale that is too low", alert="GradientUnderflow", signal="layer_grad_tiny_share",
        delay=20, loop=scaled_too_little, cause="loss scale of 1 is too low", names=("0\\.weight", "bf16"),
    ),
    Fault(
        id="P5", what="weights in pure bf16", alert="LostUpdates", signal="lost_update_share", delay=50,
        loop=pure_bf16, cause="bfloat16.*rounded back", names=("master weights", "stochastic"),
    ),
    Fault(
        id="P6", what="clips before it unscales", alert="ClipBeforeUnscale", signal="loss_scale", delay=5,
        loop=clipped_first, cause="the order", names=("scaler.unscale_\\(optimizer\\); clip_grad_norm_",),
        begins=True,
    ),
    Fault(
        id="P7", what="gradients that are added up in bf16", alert="LowPrecisionAccumulation",
        signal="accumulation_error", delay=20, loop=summed_in_bf16, cause="gradients of 16 passes.*bfloat16",
        names=("reduce_dtype=torch.float32",),
    ),
)  # fmt: skip
