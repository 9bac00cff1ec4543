"""Tier 1: the total gradient norm, as the loss made it and as the optimizer gets it."""

from __future__ import annotations

from sentinel.hooks.probe import Probe, Step


class GradientNorm(Probe):
    """L2 norm over all gradients of the optimizer, before and after clipping."""

    tier = 1

    def before(self, step: Step) -> None:
        gradients = step.gradients
        if gradients is None or not gradients.rows:
            return
        step.values["grad_norm_applied"] = gradients.total
        if gradients.sharded is not None:
            step.values["grad_norm_applied_sharded"] = gradients.sharded
        if step.clip is None:
            step.values["grad_norm"] = gradients.total
            if gradients.sharded is not None:
                step.values["grad_norm_sharded"] = gradients.sharded
        elif gradients.sharded is not None and step.clip[0] is not None:
            # The norm that clipping computed is over the shards of all ranks already.
            step.values["grad_norm_sharded"] = 0.0
