"""Tier 3: how much memory the optimizer's state holds."""

from __future__ import annotations

import torch

from sentinel.hooks.layers import local
from sentinel.hooks.probe import Probe, Step


class StateSize(Probe):
    """Bytes in the tensors of `optimizer.state`, of this rank's shards: Adam's two moments are twice the parameters."""

    tier = 3

    def after(self, step: Step) -> None:
        held = 0
        for state in step.optimizer.state.values():
            for value in state.values() if isinstance(state, dict) else ():
                if isinstance(value, torch.Tensor):
                    part = local(value)
                    held += part.numel() * part.element_size()
        step.values["optimizer_state_bytes"] = float(held)
