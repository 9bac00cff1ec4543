"""The vocabulary: every signal, and all that the rest of Sentinel needs to know about it.

A leaf, and free of torch: the hooks and the daemon measure these, the rule compiler checks names against them,
Prometheus and the docs take their units from here. A probe from another package announces its own in its hello.
"""

from __future__ import annotations

from typing import Literal

import msgspec

Scope = Literal["rank", "layer", "gpu", "node"]
Combine = Literal["mean", "max", "min", "sum", "norm", "any"]
Kind = Literal["gauge", "counter", "event"]

CLOCK = -1

OPENING_STEPS = 64
"""The first steps of a run, which are examined fully: tiers 1 and 2 are sampled at each, tier 3 at every 8th."""
OPENING_END = 512
"""The step from which on only the budget decides how often each tier is sampled."""
TIERS = ("times", "the total gradient norm", "gradients of each layer", "weights and their updates")
"""What each tier of `Signal` is, for people; the first is tier 0, of which the loss is taken at every step."""


class Signal(msgspec.Struct, frozen=True):
    """One measured quantity."""

    name: str
    unit: str
    """The base unit, as in Prometheus: seconds, bytes, ratio, or 1 for a bare number."""
    scope: Scope
    """`rank`: one number per rank. `layer`: one per parameter tensor. `gpu`, `node`: one per device, one per
    machine."""
    combine: Combine
    """How the run's value is computed from the ranks' values: `any` takes a replica's; `norm` takes a replica's and
    adds shards in squares (the signal that is `part_of` it holds the part of a rank's norm that comes from its own
    shards, if it has any)."""
    tier: int
    """How often it is measured. 0: every step; 1: every k steps; 2: every k' steps; 3: rarely. The governor picks k.
    `CLOCK`: by the daemon, from time to time, between steps."""
    meaning: str
    kind: Kind = "gauge"
    """`counter`: it only rises. `event`: it belongs to one reading, which a scrape may miss, so Prometheus gets no
    series."""
    staged: bool = False
    """Whether another task or other data change it: rules over it start over with a stage (`monitor.stage`)."""
    by_rank: bool = False
    """Whether Prometheus gets a series for each rank; it gets the run's value in any case."""
    keep_highest: bool = False
    """Whether its highest values are kept when the history is thinned."""
    compared: bool = False
    """For layers: whether ranks that hold replicas have the same value. Where it differs, so do their parameters."""
    part_of: str = ""
    """The signal of scope rank of which this one is the part from the rank's own shards; empty for most."""

    @property
    def undoable(self) -> bool:
        """Whether a rollback takes it back: times, memory and what the daemon measures by the clock are not taken
        back."""
        return self.tier != CLOCK and self.unit not in ("seconds", "bytes")


def _rank(
    name: str,
    unit: str,
    combine: Combine,
    tier: int,
    meaning: str,
    *,
    kind: Kind = "gauge",
    staged: bool = False,
    by_rank: bool = False,
    keep_highest: bool = False,
    part_of: str = "",
) -> Signal:
    return Signal(name, unit, "rank", combine, tier, meaning, kind, staged, by_rank, keep_highest, part_of=part_of)


def _layer(
    name: str, unit: str, combine: Combine, tier: int, meaning: str, *, staged: bool = False, compared: bool = False
) -> Signal:
    return Signal(name, unit, "layer", combine, tier, meaning, staged=staged, compared=compared)


def _gpu(name: str, unit: str, meaning: str, *, kind: Kind = "gauge") -> Signal:
    return Signal(name, unit, "gpu", "any", CLOCK, meaning, kind)


def _node(name: str, unit: str, meaning: str) -> Signal:
    return Signal(name, unit, "node", "any", CLOCK, meaning)


EXPONENTS = tuple(range(-48, 4, 4))
"""Exponents of two that bound the histogram of gradient elements."""


def below(exponent: int) -> str:
    """Return the name of the signal for the share of gradient elements under 2^exponent: `grad_below_2m24`."""
    return f"grad_below_2{'m' if exponent < 0 else 'p'}{abs(exponent)}"


def _below(exponent: int) -> Signal:
    meaning = f"share of sampled gradient elements that are not 0 and under 2^{exponent}, {2.0**exponent:.1g}, unscaled"
    return _rank(below(exponent), "ratio", "mean", 3, meaning)


_ALL = (
    _rank(
        "loss",
        "1",
        "mean",
        0,
        "sum of the losses that `backward()` was called on since the last step, unscaled",
        staged=True,
        by_rank=True,
        keep_highest=True,
    ),
    _rank("micro_batches", "1", "sum", 0, "backward passes since the last step"),
    _rank("learning_rate", "1", "max", 0, "largest learning rate of the parameter groups", staged=True),
    _rank(
        "loss_scale",
        "1",
        "any",
        0,
        "GradScaler's scale, as the backward pass used it; or the optimizer's own",
        by_rank=True,
    ),
    _rank(
        "step_skipped",
        "1",
        "max",
        0,
        "1 where GradScaler withheld the step as a gradient overflowed, else 0; absent without a scaler",
    ),
    _rank(
        "fp16",
        "1",
        "max",
        0,
        "1 where forward passes ran under fp16 autocast, or parameters are fp16; absent otherwise",
    ),
    _rank("clip_limit", "1", "any", 0, "max_norm that the loop clips to"),
    _rank(
        "clipped_scaled", "1", "max", 0, "1 where the loop clipped gradients that were still scaled; absent otherwise"
    ),
    _rank(
        "rival_loss",
        "1",
        "max",
        0,
        "1 where another optimizer steps on a loss of its own, as in a GAN; absent otherwise",
        staged=True,
    ),
    _rank(
        "reinforcement_learning",
        "1",
        "max",
        0,
        "1 where the run is judged as reinforcement learning, by what it logs or by `kind=`; absent otherwise",
        staged=True,
    ),
    _rank(
        "resumed",
        "1",
        "max",
        0,
        "1 at the first step where `attach` was given another number than 0, or none before was seen; else absent",
    ),
    _rank("eval_mode", "1", "max", 0, "1 where the model trained in evaluation mode; absent otherwise"),
    _rank("batch_size", "1", "sum", 1, "first dimension of the batch's first tensor"),
    _rank(
        "batch_length",
        "1",
        "max",
        1,
        "second dimension of the batch's first tensor: the sequence length of [batch, sequence]",
    ),
    _rank("batch_elements", "1", "sum", 1, "elements of all tensors of the batch"),
    _rank(
        "batch_identity", "1", "any", 1, "hash of a few elements of the batch; absent where the batch comes on a device"
    ),
    _rank(
        "batch_repeated",
        "1",
        "max",
        1,
        "1 where this batch's hash equals that of one of the last 64 examined in this epoch, else 0",
    ),
    _rank(
        "copied_generators",
        "1",
        "max",
        1,
        "random generators of the data set that its samples are made with and of which each worker of the loader has a "
        "copy in the same state; absent where none was found, with fewer than two workers, and with a worker_init_fn",
    ),
    _rank("gradients_kept", "1", "max", 1, "1 where the gradients of the step before were added to, else 0"),
    _rank(
        "unnormalised_passes",
        "1",
        "max",
        1,
        "backward passes of a step, if no loss of theirs is divided by their number; absent otherwise",
    ),
    _rank(
        "accumulation_error",
        "ratio",
        "max",
        1,
        "L2 norm of what 4 backward passes or more lose in adding up gradients in bf16, over that of the sum; sampled",
    ),
    _rank(
        "step_seconds",
        "seconds",
        "max",
        0,
        "time from the exit of the step before to the exit of this one",
        staged=True,
        by_rank=True,
        keep_highest=True,
    ),
    _rank("data_seconds", "seconds", "max", 0, "time spent waiting for the DataLoader", staged=True, by_rank=True),
    _rank("forward_seconds", "seconds", "max", 0, "time in the forward passes of the watched model", staged=True),
    _rank("backward_seconds", "seconds", "max", 0, "time in the backward passes", staged=True),
    _rank("optimizer_seconds", "seconds", "max", 0, "time in optimizer.step", staged=True),
    _rank(
        "communication_seconds",
        "seconds",
        "min",
        1,
        "time that DDP's reduction of gradients takes after the backward pass, at an iteration that DDP timed",
        staged=True,
    ),
    _rank(
        "other_seconds",
        "seconds",
        "max",
        0,
        "rest of the step: neither data, forward, backward nor optimizer",
        staged=True,
    ),
    _rank(
        "grad_norm",
        "1",
        "norm",
        1,
        "total gradient norm (L2) before clipping, unscaled",
        staged=True,
        by_rank=True,
        keep_highest=True,
    ),
    _rank(
        "grad_norm_sharded",
        "1",
        "norm",
        1,
        "the part of grad_norm from this rank's own shards; 0 where clipping computed grad_norm over all shards",
        part_of="grad_norm",
    ),
    _rank(
        "grad_norm_applied",
        "1",
        "norm",
        1,
        "total gradient norm (L2) as the optimizer gets it, after clipping",
        staged=True,
    ),
    _rank(
        "grad_norm_applied_sharded",
        "1",
        "norm",
        1,
        "the part of grad_norm_applied from this rank's own shards",
        part_of="grad_norm_applied",
    ),
    _rank("parameters_without_gradient", "1", "max", 2, "parameters of the optimizer that train and got no gradient"),
    _rank(
        "without_gradient_share",
        "ratio",
        "max",
        2,
        "share that parameters_without_gradient are of the numbers that the optimizer is to train",
    ),
    _rank(
        "parameters_outside",
        "1",
        "max",
        2,
        "parameters that train, get gradients, are in no optimizer and stand still; absent where there never were any",
    ),
    _rank("outside_share", "ratio", "max", 2, "share that parameters_outside are of the numbers that train"),
    _rank(
        "no_gradient",
        "1",
        "min",
        1,
        "1 where backward passes ran and the optimizer's parameters got no gradient; absent otherwise",
    ),
    _rank(
        "grad_zero_share", "ratio", "mean", 2, "share of sampled gradient elements that are 0 (in fp16 without scale)"
    ),
    _rank(
        "grad_tiny_share",
        "ratio",
        "mean",
        2,
        "share of sampled gradient elements, nonzero but under fp16's smallest normal, 6e-5 (in fp16 without scale)",
    ),
    _rank(
        "gradient_depth_ratio",
        "ratio",
        "any",
        2,
        "gradients of the last quarter of the weight matrices over those of the first: medians of their RMS",
        staged=True,
    ),
    _rank(
        "loader_batches",
        "1",
        "max",
        2,
        "batches of a pass over the training loader, where all ranks must take as many (DDP, shards); absent otherwise",
    ),
    _rank(
        "opening_step",
        "1",
        "max",
        0,
        "1 where the opening examination looked at the step, else 0; absent from 64 samples after it on",
    ),
    _rank("rss_bytes", "bytes", "max", 2, "resident set size of the process", by_rank=True),
    _rank(
        "memory_held_bytes",
        "bytes",
        "max",
        2,
        "resident memory that cannot be dropped: rss_bytes without pages of files. At every step while it rises",
        by_rank=True,
    ),
    _rank(
        "memory_left_bytes",
        "bytes",
        "min",
        2,
        "host memory that the process may still take: the least that the machine, a cgroup or a ulimit leaves",
    ),
    _rank(
        "device_memory_left_bytes",
        "bytes",
        "min",
        2,
        "device memory that live tensors do not take (absent without CUDA)",
    ),
    _rank(
        "memory_allocated_bytes",
        "bytes",
        "max",
        2,
        "caching allocator: bytes in live tensors, after the step; at every step while they rise",
        by_rank=True,
    ),
    _rank("memory_peak_bytes", "bytes", "max", 2, "caching allocator: most bytes in live tensors so far"),
    _rank("memory_reserved_bytes", "bytes", "max", 2, "caching allocator: bytes held from the device", by_rank=True),
    _rank("memory_active_bytes", "bytes", "max", 2, "caching allocator: live tensors and blocks awaiting a stream"),
    _rank(
        "memory_inactive_split_bytes", "bytes", "max", 2, "caching allocator: free parts of split blocks", by_rank=True
    ),
    _rank(
        "allocation_retries",
        "1",
        "sum",
        2,
        "caching allocator: cache flushes after a failed cudaMalloc, so far",
        kind="counter",
    ),
    _rank(
        "out_of_memory_errors", "1", "sum", 2, "caching allocator: out-of-memory errors thrown, so far", kind="counter"
    ),
    *map(_below, EXPONENTS),
    _rank("weight_norm", "1", "norm", 3, "L2 norm of the parameters after the step, from a strided sample"),
    _rank("weight_norm_sharded", "1", "norm", 3, "weight_norm of this rank's own shards", part_of="weight_norm"),
    _rank(
        "update_ratio",
        "ratio",
        "mean",
        3,
        "L2 norm of the step's update over that of the parameters, sampled",
        staged=True,
    ),
    _rank("last_update_size", "1", "max", 2, "size of the last update over its rate, from the optimizer's state"),
    _rank(
        "second_moment_kept",
        "ratio",
        "min",
        2,
        "second moments before the step over the least that the optimizer's updates can have left of the last "
        "sample's, lowest of four parameters: at least 1 unless the state was changed",
    ),
    _rank(
        "second_moment_growth",
        "ratio",
        "min",
        3,
        "second moments over those at the last sample of tier 3, lowest of four parameters: 100 and more after a "
        "gradient of some hundred times the usual",
    ),
    _rank(
        "lost_update_share",
        "ratio",
        "mean",
        3,
        "share of sampled parameter elements with a gradient that are the same after the step: rounded away",
    ),
    _rank("parameter_checksum", "1", "any", 3, "checksum of a sample of the unsharded parameters, after the step"),
    _rank(
        "replica_checksum",
        "1",
        "any",
        3,
        "checksum of a sample of the replicated parameters after the step, under DDP; absent otherwise",
    ),
    _rank("frozen_checksum", "1", "any", 3, "checksum of a sample of the frozen parameters"),
    _rank("frozen_changed", "1", "max", 3, "frozen parameters in the optimizer that changed since the last check"),
    _rank(
        "frozen_moved",
        "1",
        "max",
        3,
        "frozen parameters outside the optimizer that changed since the last check (may be a moving average)",
    ),
    _rank("frozen_changed_row", "1", "max", 3, "layer-table row of the first frozen parameter that changed; -1: none"),
    _rank(
        "frozen_statistics",
        "1",
        "max",
        3,
        "frozen batch and instance norms in training mode, whose running statistics move; absent where none is frozen",
    ),
    _rank("frozen_statistics_row", "1", "max", 3, "layer-table row of the weight of the first of them; -1: not known"),
    _rank("post_norm_layers", "1", "max", 3, "normalisations after a residual addition (Post-LN); absent without any"),
    _rank("optimizer_state_bytes", "bytes", "max", 3, "tensors of the optimizer's state, of this rank's shards"),
    _rank(
        "adapter_ratio",
        "ratio",
        "min",
        2,
        "root mean square of LoRA's B over that of A, median over the adapters; absent without adapters",
        staged=True,
    ),
    _rank(
        "adapter_rank_used",
        "1",
        "min",
        2,
        "directions of LoRA's product BA in use: participation ratio of its spectrum, median; absent without adapters",
    ),
    _rank(
        "scheduler_first",
        "1",
        "max",
        3,
        "learning rate that the first step should have had, if the scheduler was stepped before it; absent otherwise",
    ),
    _rank(
        "data_parallel_devices", "1", "max", 3, "devices that nn.DataParallel splits batches over; absent without it"
    ),
    _rank(
        "scheduler_steps",
        "1",
        "max",
        3,
        "where the rate is 0 after 8 steps: how often the scheduler was stepped by then, -1: no scheduler; else absent",
    ),
    _rank("out_of_memory", "1", "max", CLOCK, "1 where an allocation failed, and the exception was not caught"),
    _rank("rank_lost", "1", "max", CLOCK, "1 where the rank's process ended without a goodbye"),
    _rank(
        "collectives_differ",
        "1",
        "max",
        CLOCK,
        "1 where the rank issued another collective than the others",
    ),
    _rank(
        "stalled_seconds",
        "seconds",
        "max",
        CLOCK,
        "seconds without progress, where the training loop should make some",
        by_rank=True,
    ),
    _rank(
        "stall_limit_seconds",
        "seconds",
        "max",
        CLOCK,
        "seconds without progress after which the rank counts as hung",
        by_rank=True,
    ),
    _rank(
        "snapshot_age_steps",
        "1",
        "max",
        CLOCK,
        "steps since the newest good snapshot, or without one since the first step; absent where no rollback is armed",
    ),
    _rank(
        "snapshot_age_limit_steps",
        "1",
        "max",
        CLOCK,
        "snapshot_age_steps from which the newest good snapshot is stale: 3 x `every`, or `margin` + 2 x `every`",
    ),
    _layer("layer_grad_norm", "1", "norm", 2, "L2 norm of the parameter's gradient, unscaled", staged=True),
    _layer("layer_grad_min", "1", "min", 2, "smallest element of the parameter's gradient, unscaled", staged=True),
    _layer("layer_grad_max", "1", "max", 2, "largest element of the parameter's gradient, unscaled", staged=True),
    _layer("layer_nonfinite", "1", "sum", 2, "elements of the parameter's gradient that are NaN or infinite"),
    _layer("layer_grad_smallest", "1", "min", 3, "smallest magnitude over 0 in the parameter's gradient, unscaled"),
    _layer("layer_grad_zero_share", "ratio", "mean", 3, "share of the gradient's elements that are 0"),
    _layer(
        "layer_grad_tiny_share",
        "ratio",
        "mean",
        3,
        "share of the gradient's elements, nonzero but, times the loss scale, under fp16's smallest normal, 6e-5",
    ),
    _layer("layer_weight_norm", "1", "norm", 3, "L2 norm of the parameter after the step, sampled"),
    _layer(
        "layer_update_ratio",
        "ratio",
        "mean",
        3,
        "L2 norm of the step's update over that of the parameter, sampled",
        staged=True,
    ),
    _layer(
        "layer_checksum",
        "1",
        "any",
        3,
        "checksum of a sample of the parameter after the step, under DDP; absent otherwise",
        compared=True,
    ),
    _layer(
        "layer_lost_share",
        "ratio",
        "mean",
        3,
        "share of the parameter's elements with a gradient that the step left the same, sampled",
    ),
    _gpu("gpu_utilization_ratio", "ratio", "share of the last sample period in which a kernel ran"),
    _gpu(
        "gpu_memory_utilization_ratio",
        "ratio",
        "share of the last sample period in which device memory was read or written",
    ),
    _gpu("gpu_memory_used_bytes", "bytes", "device memory in use, by all processes"),
    _gpu("gpu_memory_total_bytes", "bytes", "device memory that there is"),
    _gpu("gpu_memory_foreign_bytes", "bytes", "device memory of processes that belong to no run watched here"),
    _gpu("gpu_temperature_celsius", "celsius", "temperature of the chip"),
    _gpu("gpu_power_watts", "watts", "power drawn by the board"),
    _gpu("gpu_power_limit_watts", "watts", "power limit of the board"),
    _gpu("gpu_clock_hertz", "hertz", "clock of the multiprocessors"),
    _gpu("gpu_clock_limit_hertz", "hertz", "highest clock that the multiprocessors can have"),
    _gpu("gpu_throttled_thermal", "1", "1 where clocks are held down by heat, else 0"),
    _gpu("gpu_throttled_power", "1", "1 where clocks are held down by the power limit, as under full load they may be"),
    _gpu("gpu_throttled_hardware", "1", "1 where the board itself holds clocks down: heat, power supply, power brake"),
    _gpu("gpu_ecc_corrected", "1", "corrected ECC errors since the driver was loaded", kind="counter"),
    _gpu("gpu_ecc_uncorrected", "1", "uncorrectable ECC errors since the driver was loaded", kind="counter"),
    _gpu("gpu_rows_remapped_uncorrectable", "1", "rows of memory that were replaced after uncorrectable errors"),
    _gpu("gpu_row_remap_pending", "1", "1 where a row is to be replaced at the next reset, else 0"),
    _gpu("gpu_row_remap_failed", "1", "1 where a row could not be replaced, else 0"),
    _gpu("gpu_pcie_replays", "1", "PCIe packets that were sent again, since the driver was loaded", kind="counter"),
    _gpu("gpu_nvlinks_up", "1", "NVLinks that are up"),
    _gpu("gpu_nvlink_errors", "1", "errors that the NVLinks counted: replays, recoveries, CRC", kind="counter"),
    _gpu("gpu_xid", "1", "XID, since the last reading, of a kind that tells of the hardware; 0: none", kind="event"),
    _gpu(
        "gpu_xid_program",
        "1",
        "XID, since the last reading, of a kind most often caused by the program; 0: none",
        kind="event",
    ),
    _gpu("gpu_lost", "1", "1 where the driver says that the GPU is lost or must be reset, else 0"),
    _gpu("gpu_silent_seconds", "seconds", "for how long the driver has owed an answer about the GPU; 0: it answers"),
    _node("host_cpu_ratio", "ratio", "share of all CPUs that is in use"),
    _node("host_load_ratio", "ratio", "load average of the last minute over the number of CPUs"),
    _node("host_memory_available_bytes", "bytes", "host memory that can be had without swapping"),
    _node("host_memory_total_bytes", "bytes", "host memory that there is"),
    _node("host_swap_used_bytes", "bytes", "swap in use"),
    _node("container_memory_used_bytes", "bytes", "memory of the container or batch job, less idle file cache"),
    _node("container_memory_limit_bytes", "bytes", "nearest memory limit of the cgroups; absent without one"),
)

SIGNALS: dict[str, Signal] = {signal.name: signal for signal in _ALL}
"""Signals by name, in the order of the docs."""
