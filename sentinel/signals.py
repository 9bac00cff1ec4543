"""The vocabulary: every signal, with its unit, its scope and how ranks make the run's value.

A leaf, and free of torch: the hooks and the daemon measure these, the rule compiler checks names against them,
Prometheus and the docs take their units from here. A probe from another package brings its own with the hello.
"""

from __future__ import annotations

from typing import Literal

import msgspec

Scope = Literal["rank", "layer", "gpu", "node"]
Combine = Literal["mean", "max", "min", "sum", "norm", "any"]

CLOCK = -1


class Signal(msgspec.Struct, frozen=True):
    """One measured quantity."""

    name: str
    unit: str
    """Base units, as in Prometheus: seconds, bytes, ratio, or 1 for a bare number."""
    scope: Scope
    """`rank`: one number a rank. `layer`: one a parameter tensor. `gpu`, `node`: one a device, one a machine."""
    combine: Combine
    """How the run's value comes from the ranks': `any` takes a replica's; `norm` takes a replica's and adds shards in
    squares (`<name>_sharded` holds the part of a rank's norm that is its own shards, where it has any)."""
    tier: int
    """0: every step; 1: every k steps; 2: every k' steps; 3: rarely. The governor picks k. `CLOCK`: by the daemon, from
    time to time, between steps."""
    meaning: str


def _rank(name: str, unit: str, combine: Combine, tier: int, meaning: str) -> Signal:
    return Signal(name, unit, "rank", combine, tier, meaning)


def _layer(name: str, unit: str, combine: Combine, tier: int, meaning: str) -> Signal:
    return Signal(name, unit, "layer", combine, tier, meaning)


def _gpu(name: str, unit: str, meaning: str) -> Signal:
    return Signal(name, unit, "gpu", "any", CLOCK, meaning)


def _node(name: str, unit: str, meaning: str) -> Signal:
    return Signal(name, unit, "node", "any", CLOCK, meaning)


EXPONENTS = tuple(range(-48, 4, 4))
"""Of two: the bounds of the histogram of gradient elements."""


def below(exponent: int) -> str:
    """The signal of the share of gradient elements under 2^exponent: `grad_below_2m24`."""
    return f"grad_below_2{'m' if exponent < 0 else 'p'}{abs(exponent)}"


def _below(exponent: int) -> Signal:
    meaning = f"share of sampled gradient elements that are not 0 and under 2^{exponent}, {2.0**exponent:.1g}, unscaled"
    return _rank(below(exponent), "ratio", "mean", 3, meaning)


_ALL = (
    _rank("loss", "1", "mean", 0, "sum of the roots of all backward passes since the last step, unscaled"),
    _rank("micro_batches", "1", "sum", 0, "backward passes since the last step"),
    _rank("learning_rate", "1", "max", 0, "largest learning rate of the parameter groups"),
    _rank("loss_scale", "1", "any", 0, "GradScaler's scale, as the backward pass used it; or the optimizer's own"),
    _rank(
        "step_skipped",
        "1",
        "max",
        0,
        "1 where GradScaler withheld the step as a gradient overflowed, else 0; without one none",
    ),
    _rank("fp16", "1", "max", 0, "1 where forward passes ran under fp16 autocast, or parameters are fp16; else none"),
    _rank("clip_limit", "1", "any", 0, "max_norm that the loop clips to"),
    _rank("clipped_scaled", "1", "max", 0, "1 where it clipped gradients that were still scaled; else none"),
    _rank("rival_loss", "1", "max", 0, "1 where another optimizer steps on a loss of its own, as in a GAN; else none"),
    _rank("eval_mode", "1", "max", 0, "1 where the model trained in evaluation mode; else none"),
    _rank("batch_size", "1", "sum", 1, "first dimension of the batch's first tensor"),
    _rank("batch_length", "1", "max", 1, "its second dimension: of [batch, sequence] the sequence length"),
    _rank("batch_elements", "1", "sum", 1, "elements of all tensors of the batch"),
    _rank("batch_identity", "1", "any", 1, "hash of a few elements of the batch; none where it comes on a device"),
    _rank("batch_repeated", "1", "max", 1, "1 where one of the last 64 looked at in this epoch had the same, else 0"),
    _rank("gradients_kept", "1", "max", 1, "1 where the gradients of the step before were added to, else 0"),
    _rank(
        "unnormalised_passes",
        "1",
        "max",
        1,
        "backward passes of a step, if no loss of theirs is divided; else none",
    ),
    _rank(
        "accumulation_error",
        "ratio",
        "max",
        1,
        "of gradients that 4 passes or more add up in bf16: L2 norm of what is lost over that of the sum, sampled",
    ),
    _rank("step_seconds", "seconds", "max", 0, "from the exit of the step before to the exit of this one"),
    _rank("data_seconds", "seconds", "max", 0, "waiting for the DataLoader"),
    _rank("forward_seconds", "seconds", "max", 0, "in the forward passes of the watched model"),
    _rank("backward_seconds", "seconds", "max", 0, "in the backward passes"),
    _rank("optimizer_seconds", "seconds", "max", 0, "in optimizer.step"),
    _rank(
        "communication_seconds",
        "seconds",
        "min",
        1,
        "that DDP's reduction of gradients takes after the backward pass, at an iteration that it timed",
    ),
    _rank("other_seconds", "seconds", "max", 0, "the rest of the step"),
    _rank("grad_norm", "1", "norm", 1, "total gradient norm (L2) before clipping, unscaled"),
    _rank("grad_norm_sharded", "1", "sum", 1, "the part of grad_norm that comes from this rank's own shards"),
    _rank("grad_norm_applied", "1", "norm", 1, "total gradient norm (L2) as the optimizer gets it, after clipping"),
    _rank("grad_norm_applied_sharded", "1", "sum", 1, "the part of grad_norm_applied from this rank's own shards"),
    _rank("parameters_without_gradient", "1", "max", 2, "parameters of the optimizer that train and got no gradient"),
    _rank(
        "no_gradient", "1", "min", 2, "1 where backward passes ran and the optimizer's parameters got none; else none"
    ),
    _rank(
        "grad_zero_share", "ratio", "mean", 2, "share of sampled gradient elements that are 0; in fp16 without scale"
    ),
    _rank("grad_tiny_share", "ratio", "mean", 2, "the same, of those under fp16's smallest normal number, 6e-5"),
    _rank(
        "gradient_depth_ratio",
        "ratio",
        "any",
        2,
        "gradients of the last quarter of the weight matrices over those of the first: medians of their RMS",
    ),
    _rank(
        "loader_batches",
        "1",
        "max",
        2,
        "batches of a pass over the loader that trains, where ranks must take as many steps (DDP, shards); else none",
    ),
    _rank("rss_bytes", "bytes", "max", 2, "resident set size of the process"),
    _rank("memory_allocated_bytes", "bytes", "max", 2, "caching allocator: bytes in live tensors, after the step"),
    _rank("memory_peak_bytes", "bytes", "max", 2, "caching allocator: most bytes in live tensors so far"),
    _rank("memory_reserved_bytes", "bytes", "max", 2, "caching allocator: bytes held from the device"),
    _rank("memory_active_bytes", "bytes", "max", 2, "caching allocator: live tensors and blocks awaiting a stream"),
    _rank("memory_inactive_split_bytes", "bytes", "max", 2, "caching allocator: free parts of split blocks"),
    _rank("allocation_retries", "1", "sum", 2, "caching allocator: cache flushes after a failed cudaMalloc, so far"),
    _rank("out_of_memory_errors", "1", "sum", 2, "caching allocator: out-of-memory errors thrown, so far"),
    *map(_below, EXPONENTS),
    _rank("weight_norm", "1", "mean", 3, "L2 norm of the parameters after the step, from a strided sample"),
    _rank("update_ratio", "ratio", "mean", 3, "L2 norm of the step's update over that of the parameters, sampled"),
    _rank(
        "lost_update_share",
        "ratio",
        "mean",
        3,
        "share of sampled parameter elements with a gradient that are the same after the step: rounded away",
    ),
    _rank("parameter_checksum", "1", "any", 3, "of a sample of the parameters that are no shards, after the step"),
    _rank("replica_checksum", "1", "any", 3, "the same, where DDP keeps all ranks' parameters equal; else none"),
    _rank("frozen_checksum", "1", "any", 3, "of a sample of the parameters that do not train"),
    _rank("frozen_changed", "1", "max", 3, "how many of these that are in the optimizer changed since the last look"),
    _rank("frozen_moved", "1", "max", 3, "how many that are not: they may be a moving average of the others"),
    _rank("frozen_changed_row", "1", "max", 3, "row in the layer table of the first of both; -1: none"),
    _rank("post_norm_layers", "1", "max", 3, "normalisations after a residual addition (Post-LN); without any none"),
    _rank("optimizer_state_bytes", "bytes", "max", 3, "tensors of the optimizer's state, of this rank's shards"),
    _rank("adapter_ratio", "ratio", "min", 3, "of LoRA's B over A, root mean squares, median; without adapters none"),
    _rank(
        "adapter_rank_used",
        "1",
        "min",
        3,
        "directions of LoRA's B A in use: participation ratio of its spectrum, median",
    ),
    _rank(
        "scheduler_first",
        "1",
        "max",
        3,
        "rate that the first step should have had, where the scheduler was stepped before",
    ),
    _rank(
        "scheduler_steps",
        "1",
        "max",
        3,
        "where the rate is 0 after 8 steps: how often the scheduler was stepped by then, -1 without one; else none",
    ),
    _rank("data_parallel_devices", "1", "max", 3, "devices that nn.DataParallel splits batches over; without it none"),
    _rank("out_of_memory", "1", "max", CLOCK, "1 where an allocation failed, and the exception was not caught"),
    _rank("rank_lost", "1", "max", CLOCK, "1 where the rank's process ended without a goodbye"),
    _rank(
        "collectives_differ",
        "1",
        "max",
        CLOCK,
        "1 where it issued another collective than the rest",
    ),
    _rank("stalled_seconds", "seconds", "max", CLOCK, "without progress, where the training loop should make some"),
    _rank("stall_limit_seconds", "seconds", "max", CLOCK, "how long that may last, by the run's own longest gap"),
    _layer("layer_grad_norm", "1", "norm", 2, "L2 norm of the parameter's gradient, unscaled"),
    _layer("layer_grad_min", "1", "min", 2, "smallest element of the parameter's gradient, unscaled"),
    _layer("layer_grad_max", "1", "max", 2, "largest element of the parameter's gradient, unscaled"),
    _layer("layer_nonfinite", "1", "sum", 2, "elements of the parameter's gradient that are NaN or infinite"),
    _layer("layer_grad_smallest", "1", "min", 3, "smallest magnitude over 0 in the parameter's gradient, unscaled"),
    _layer("layer_grad_zero_share", "ratio", "mean", 3, "share of the gradient's elements that are 0"),
    _layer(
        "layer_grad_tiny_share",
        "ratio",
        "mean",
        3,
        "share of its elements that are not 0 and, times the loss scale, under fp16's smallest normal number, 6e-5",
    ),
    _layer("layer_weight_norm", "1", "norm", 3, "L2 norm of the parameter after the step, sampled"),
    _layer("layer_update_ratio", "ratio", "mean", 3, "L2 norm of its update over that of the parameter, sampled"),
    _layer("layer_checksum", "1", "any", 3, "of a sample of the parameter after the step, under DDP; else none"),
    _layer("layer_lost_share", "ratio", "mean", 3, "share of its elements with a gradient that the step left the same"),
    _gpu("gpu_utilization_ratio", "ratio", "share of the last sample period in which a kernel ran"),
    _gpu("gpu_memory_utilization_ratio", "ratio", "share of it in which device memory was read or written"),
    _gpu("gpu_memory_used_bytes", "bytes", "device memory in use, by whomever"),
    _gpu("gpu_memory_total_bytes", "bytes", "device memory that there is"),
    _gpu("gpu_memory_foreign_bytes", "bytes", "device memory of processes that belong to no run watched here"),
    _gpu("gpu_temperature_celsius", "celsius", "temperature of the chip"),
    _gpu("gpu_power_watts", "watts", "power drawn by the board"),
    _gpu("gpu_power_limit_watts", "watts", "power that it may draw"),
    _gpu("gpu_clock_hertz", "hertz", "clock of the multiprocessors"),
    _gpu("gpu_clock_limit_hertz", "hertz", "highest clock that they can have"),
    _gpu("gpu_throttled_thermal", "1", "1 where clocks are held down by heat, else 0"),
    _gpu("gpu_throttled_power", "1", "1 where clocks are held down by the power limit, as under full load they may be"),
    _gpu("gpu_throttled_hardware", "1", "1 where the board itself holds clocks down: heat, power supply, power brake"),
    _gpu("gpu_ecc_corrected", "1", "ECC errors that were corrected, since the driver was loaded"),
    _gpu("gpu_ecc_uncorrected", "1", "ECC errors that were not, since the driver was loaded"),
    _gpu("gpu_rows_remapped_uncorrectable", "1", "rows of memory that were replaced after uncorrectable errors"),
    _gpu("gpu_row_remap_pending", "1", "1 where a row is to be replaced at the next reset, else 0"),
    _gpu("gpu_row_remap_failed", "1", "1 where a row could not be replaced, else 0"),
    _gpu("gpu_pcie_replays", "1", "PCIe packets that were sent again, since the driver was loaded"),
    _gpu("gpu_nvlinks_up", "1", "NVLinks that are up"),
    _gpu("gpu_nvlink_errors", "1", "errors that the NVLinks counted: replays, recoveries, CRC"),
    _gpu("gpu_xid", "1", "XID of the driver that tells of the hardware, since the reading before; 0: none"),
    _gpu("gpu_xid_program", "1", "the same, of an XID that most often is the program's own doing"),
    _gpu("gpu_lost", "1", "1 where the driver says that the GPU is lost or must be reset, else 0"),
    _gpu("gpu_silent_seconds", "seconds", "for how long the driver has owed an answer about the GPU; 0: it answers"),
    _node("host_cpu_ratio", "ratio", "share of all CPUs that is in use"),
    _node("host_load_ratio", "ratio", "load average of the last minute over the number of CPUs"),
    _node("host_memory_available_bytes", "bytes", "host memory that can be had without swapping"),
    _node("host_memory_total_bytes", "bytes", "host memory that there is"),
    _node("host_swap_used_bytes", "bytes", "swap in use"),
    _node("container_memory_used_bytes", "bytes", "of a container that has a limit: memory less idle cache"),
    _node("container_memory_limit_bytes", "bytes", "what it may have: its OOM killer knows no other limit"),
)

SIGNALS: dict[str, Signal] = {signal.name: signal for signal in _ALL}
"""By name. Order is the order of the docs."""
