"""Tier 2, and only where a step runs in fp16 with nothing that scales its loss: what its gradients have lost."""

from __future__ import annotations

import torch

from sentinel.hooks.measure.probe import Probe, Step
from sentinel.hooks.torch_interop.strided_sample import meeting_place
from sentinel.hooks.torch_interop.tensors import scalar

BUDGET = 1 << 18
"""Elements that are looked at in one step, spread over all gradients."""
SMALLEST_NORMAL = 2.0**-14
"""Of fp16. What is smaller has fewer than its 11 digits, and under 2^-25 none."""


class Fp16Underflow(Probe):
    """Shares of sampled gradient elements that are 0, and that are too small for all their digits.

    Some are 0 for other reasons (a ReLU that is off, an embedding that was not used): an upper bound.
    """

    tier = 2

    def before(self, step: Step) -> None:
        gradients = step.gradients
        if gradients is None or not gradients.tensors or step.scale is not None or not step.in_fp16:
            return
        each = max(1, BUDGET // len(gradients.tensors))
        flat = [tensor.view(-1) for tensor in gradients.tensors if tensor.is_contiguous()]
        if not flat:
            return
        device = meeting_place(flat)
        parts = [one[:: -(-one.numel() // each)].to(device, non_blocking=True) for one in flat]
        sample = torch.cat(parts).abs()
        zero = sample == 0
        step.values["grad_zero_share"] = scalar(zero.float().mean())
        step.values["grad_tiny_share"] = scalar(((sample < SMALLEST_NORMAL) & ~zero).float().mean())
