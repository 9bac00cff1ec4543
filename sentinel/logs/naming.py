"""Which column of a log is which metric: as the user says, by its own name, or by the names that trainers use."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping

from sentinel.errors import LogError

ALIASES: Mapping[str, tuple[str, ...]] = {
    "loss": (
        "train_loss", "train/loss", "training_loss", "loss/train", "loss_train", "train_loss_step", "lm_loss",
        "reduced_train_loss", "train/train_loss", "loss/train/total", "train/crossentropyloss", "total_loss",
        "train/total_loss", "train/samples/train_loss", "lm_loss_training/lm_loss", "batch_loss", "nll_loss",
    ),
    "grad_norm": (
        "train/grad_norm", "gradient_norm", "gradnorm", "gnorm", "global_grad_norm", "total_grad_norm", "total_norm",
        "train/global_grad_norm", "grad_norm/total", "grad_2_norm_total", "grad_2.0_norm_total",
        "optim/total_grad_norm", "l2_norm/grad/global", "train/gradient_norm", "grad_norm_total",
    ),
    "learning_rate": (
        "lr", "train/learning_rate", "train/lr", "lr/group0", "optim/learning_rate_group0", "lr_adamw", "lr_adam",
        "lr_sgd", "lr_adamw/pg1", "lr_adam/pg1", "lr_sgd/pg1", "train/samples/lr",
    ),
    "loss_scale": ("lossscale", "amp_scale", "grad_scale", "train/loss_scale", "scale", "train/samples/loss_scale"),
    "step_skipped": ("skipped", "overflow", "found_inf", "skipped_steps"),
    "step_seconds": (
        "step_time_s", "step_time", "iteration_time", "iter_time", "time_per_step", "sec_per_step", "train/step_time",
    ),
    "data_seconds": ("data_time", "data_time_s", "data_wait_s", "train/data_time"),
    "rss_bytes": ("rss",),
    "memory_allocated_bytes": ("mem_alloc_bytes", "mem_allocated_bytes"),
    "memory_reserved_bytes": ("mem_reserved_bytes",),
}  # fmt: skip
"""Metric -> names of it, the surest first; in lower case, with `_` for blanks and dashes. Where a log has the metric's
own name, that one counts; evaluation's losses (`val_loss`, `eval_loss`) never do."""


def chosen(columns: Iterable[str], wanted: Collection[str], named: Mapping[str, str]) -> dict[str, str]:
    """Metric -> column, for the metrics that are wanted. `named` is what the user says: column -> metric.

    Raises LogError where a metric is named that nobody wants.
    """
    there = list(columns)
    for column, metric in named.items():
        if metric not in wanted:
            raise LogError(f"--map {column}={metric}: no rule reads {metric}; they read {', '.join(sorted(wanted))}")
    found = {metric: column for column, metric in named.items() if column in there}
    free = [column for column in there if column not in named]
    plain = {_plain(column): column for column in reversed(free)}
    for metric in wanted:
        if metric not in found:
            names = (metric, *ALIASES.get(metric, ()))
            name = next((name for name in names if name in plain), None)
            if name is not None:
                found[metric] = plain[name]
    return found


def _plain(column: str) -> str:
    return re.sub(r"[\s-]+", "_", column.strip().lower())
