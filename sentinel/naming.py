"""Find which logged column is which metric: by the user's mapping, by its own name, or by names that trainers use.

A leaf: the log reader and the integrations of the hooks share one table. It also recognises reinforcement learning by
the columns that are logged.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping

from sentinel.errors import LogError

ALIASES: Mapping[str, tuple[str, ...]] = {
    "loss": (
        "loss/tok",  # GNMT's, of each step; its `Training Loss` is one of an epoch
        "train_loss", "train/loss", "training_loss", "loss/train", "loss_train", "train_loss_step", "lm_loss",
        "reduced_train_loss", "train/train_loss", "loss/train/total", "train/crossentropyloss", "total_loss",
        "train/total_loss", "train/samples/train_loss", "lm_loss_training/lm_loss", "batch_loss", "nll_loss",
        "mean_loss", "loss/loss", "train/ce_loss", "loss_tgt_mean", "losses/total_loss",
        "loss_total", "loss_function",
    ),
    "grad_norm": (
        "train/grad_norm", "gradient_norm", "gradnorm", "gnorm", "global_grad_norm", "total_grad_norm", "total_norm",
        "train/global_grad_norm", "grad_norm/total", "grad_2_norm_total", "grad_2.0_norm_total",
        "optim/total_grad_norm", "l2_norm/grad/global", "train/gradient_norm", "grad_norm_total", "norm",
    ),
    "learning_rate": (
        "lr", "train/learning_rate", "train/lr", "lr/group0", "optim/learning_rate_group0", "lr_adamw", "lr_adam",
        "lr_sgd", "lr_adamw/pg1", "lr_adam/pg1", "lr_sgd/pg1", "train/samples/lr", "optim/lr_(group_0)",
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
    # Reinforcement learning, with the names that TRL, Stable-Baselines3, CleanRL, RLlib, verl, OpenRLHF and Tianshou
    # log.
    "reward": (
        "ep_rew_mean", "episode_reward", "ep_reward", "mean_reward", "reward_mean", "avg_reward", "average_reward",
        "episode_reward_mean", "rlhf_reward", "rewards/mean", "score/mean", "return", "returns", "episode_return",
        "episodic_return", "ep_return", "mean_return", "avg_return", "average_return", "return_mean", "returns/mean",
        "episode_return_mean", "returns_stat/mean", "total_reward", "episodic_reward", "env/reward_mean",
    ),
    "episode_length": (
        "ep_len_mean", "ep_len", "episodic_length", "episode_len", "episode_len_mean", "episode_length_mean",
        "mean_episode_length", "lens_stat/mean",
    ),
    "completion_length": ("completions/mean_length", "response_length", "response_length/mean"),
    "exploration_rate": ("epsilon", "eps_greedy", "exploration/epsilon"),
    "approx_kl": (
        "approxkl", "approxkl_avg", "ppo_kl", "old_approx_kl", "mean_kl_loss", "policykl", "ppo/policy/approxkl",
    ),
    "clip_fraction": (
        "clipfrac", "clip_frac", "clipfrac_avg", "pg_clipfrac", "ppo_clip_ratio", "clip_ratio",
        "clip_ratio/region_mean", "ppo/policy/clipfrac",
    ),
    "value_loss": (
        "vf_loss", "v_loss", "loss/value_avg", "td_loss", "qf_loss", "q_loss", "qf1_loss", "loss/vf", "ppo/loss/value",
        "value_function_loss",
    ),
    "critic_loss": (),
    "entropy": ("entropy_loss", "policy_entropy", "entropy_avg", "ent", "loss/ent"),
    "kl": ("objective/kl", "kl_loss", "mean_kl"),
}  # fmt: skip
"""Metric -> its other names, the surest first; in lower case, with `_` for blanks and dashes. Where a log has the
metric's own name, that column is taken; losses of an evaluation (`val_loss`, `eval_loss`) never are."""

SIGNS = frozenset({"reward", "episode_length", "approx_kl", "value_loss"})
"""Metrics that are logged in reinforcement learning and in little else."""
HINTS = frozenset({"exploration_rate", "clip_fraction", "completion_length", "critic_loss", "entropy", "kl"})
"""Metrics that reinforcement learning logs too, but not alone: differential privacy has an epsilon and clips, language
models have an entropy, autoencoders a divergence, GANs a critic. Alone or with one another, they prove nothing."""
AMBIGUOUS = frozenset({"return", "returns", "value_loss"})
"""Columns of `SIGNS` that other runs log too: a portfolio has a return, any model may have a value head. They count
only beside another of `SIGNS`; one of `HINTS` is not enough."""
PREFERENCES = frozenset({"rewards_chosen", "rewards_rejected", "rewards_margins", "chosen_reward", "reject_reward"})
"""Cleaned names that are logged only where pairs of answers are compared (DPO and its relatives, reward models): that
loss falls like any other."""
FOLDERS = frozenset({
    "actor", "charts", "critic", "env_runners", "episode", "info", "learners", "losses", "metrics", "objective",
    "policy", "rollout", "train", "update",
})  # fmt: skip
"""Prefixes that may stand before the metrics of reinforcement learning. Others do not count: a decision transformer is
evaluated by its returns (`evaluation/...`), and trained without them."""
_METRIC_OF = {name: metric for metric, names in ALIASES.items() for name in (metric, *names)}
NAME_LETTERS = 64
"""Characters that a name in a rule may have at most."""

RIVALS = (
    ("loss_d", "loss_g"), ("d_loss", "g_loss"), ("disc_loss", "gen_loss"), ("discriminator_loss", "generator_loss"),
    ("errd", "errg"), ("critic_loss", "actor_loss"), ("qf_loss", "actor_loss"), ("q_loss", "policy_loss"),
)  # fmt: skip
"""Pairs of losses that play against each other, by the name after the last slash: a GAN's, or a critic's and its
actor's. Where a log has such a pair and no loss of the whole, the first is the loss and the second its rival."""

_OTHER_LOSSES = frozenset({
    "val", "valid", "validation", "eval", "evaluation", "test", "dev", "best", "min", "ema", "aux", "kl", "value", "vf",
    "policy", "pg", "actor", "critic", "entropy", "router", "balance", "balancing", "z", "reg", "regularization",
})  # fmt: skip
"""Words in the name of a loss that is not the training loss, or is only a part of it."""


def choose_columns(columns: Iterable[str], wanted: Collection[str], named: Mapping[str, str]) -> dict[str, str]:
    """Return metric -> column for the metrics in `wanted`. `named`: the user's own mapping, column -> metric.

    Raises LogError where `named` has a metric that is not in `wanted`.
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
    if "loss" not in found:
        found |= _choose_losses(free)
    if "data_seconds" in found and "time" in plain:  # The pair of detectron2 and mmengine: the whole step and its data.
        found.setdefault("step_seconds", plain["time"])
    return {metric: column for metric, column in found.items() if metric in wanted}


def _choose_losses(columns: Collection[str]) -> dict[str, str]:
    """Return a pair of rivals, or the only training loss, whatever its name; empty where there is neither."""
    last = {_plain(column).rpartition("/")[2]: column for column in columns}
    for loss, rival in RIVALS:
        if loss in last and rival in last:
            return {"loss": last[loss], "rival_loss": last[rival]}
    only = [column for column in columns if is_loss(column) and not _OTHER_LOSSES & {*_words(column)}]
    return {"loss": only[0]} if len(only) == 1 else {}


def is_loss(column: str) -> bool:
    """Return whether a name is that of a loss of any kind: `Loss_G`, `token_nll`, but not `loss_scale`."""
    words = _words(column)
    return any(word == "nll" or word.endswith("loss") for word in words) and not {"scale", "scaler"} & {*words}


def _words(column: str) -> list[str]:
    return re.split(r"[\W_]+", column.lower())


def find_metric(column: str) -> str:
    """Return the metric that a column is, by the table alone; empty where it is none. One of `FOLDERS` before a metric
    of reinforcement learning is ignored: `rollout/ep_rew_mean`."""
    name = _plain(column)
    if name in _METRIC_OF:
        return _METRIC_OF[name]
    folder, _, rest = name.partition("/")
    if folder in FOLDERS:
        for tail in (rest, rest.rpartition("/")[2]):
            metric = _METRIC_OF.get(tail, "")
            if metric in SIGNS or metric in HINTS:
                return metric
    return ""


def clean_name(column: str, taken: Collection[str] = ()) -> str:
    """Return a column's name as a rule can write it: the metric's name where it is a metric that is not taken, else
    letters a-z, digits and underscores. Empty where nothing is left, or where that name is taken too."""
    metric = find_metric(column)
    if metric and metric not in taken:
        return metric
    name = re.sub(r"[^a-z0-9]+", "_", column.lower()).strip("_")
    name = (f"_{name}" if name[:1].isdigit() else name)[:NAME_LETTERS]
    return "" if name in taken else name


def find_rl_columns(columns: Iterable[str]) -> tuple[str, ...]:
    """Return the columns that show that a run is reinforcement learning, one for each metric; none where it is not. Two
    different metrics are needed: two of `SIGNS`, or one and a hint, where the sign's column is not ambiguous."""
    found: dict[str, str] = {}
    for column in columns:
        if clean_name(column) in PREFERENCES:
            return ()
        metric = find_metric(column)
        if metric in SIGNS or metric in HINTS:
            found.setdefault(metric, column)
    signs = SIGNS & found.keys()
    clear = any(_plain(found[metric]) not in AMBIGUOUS for metric in signs)
    return tuple(found.values()) if len(signs) >= 2 or (clear and len(found) >= 2) else ()


def _plain(column: str) -> str:
    return re.sub(r"[\s-]+", "_", column.strip().lower())
