"""The dashboard of ranks and GPUs of one run: which are slow, which are full, what the hardware reports."""

from __future__ import annotations

from sentinel.toolkit.grafana.panels import Dashboard, Panel, alarming, make_queries, number, row

_RUN = '{run="$run"}'
_GPU = ' * on (UUID) group_left (run, rank) max by (UUID, run, rank) (sentinel_rank_gpu_info{run="$run"})'
"""Adds run and rank to series of a GPU, also to dcgm-exporter's: they have the same UUID."""
_NODE = ' * on (instance) group_left max by (instance) (sentinel_rank_info{run="$run"})'
"""Selects the nodes whose daemons watch ranks of the run: a container's rank may know its host by another name."""
_BEHIND = f"max by (run) (sentinel_step{_RUN}) - on (run) group_right sentinel_step{_RUN}"
_SLOWER = f"sentinel_step_seconds{_RUN} / on (run) group_left avg by (run) (sentinel_step_seconds{_RUN})"


def _gpu(metric: str) -> str:
    return f"sentinel_gpu_{metric}{_GPU}"


def _count_over_hour(metric: str) -> str:
    return f"increase(sentinel_gpu_{metric}_total[1h]){_GPU}"


_BY_RANK = "rank {{rank}}"
_BY_GPU = "rank {{rank}}, GPU {{gpu}}"

DASHBOARD = Dashboard(
    uid="sentinel-ranks",
    title="Sentinel / Ranks and GPUs",
    description="Stragglers, memory, fragmentation, hardware; with dcgm-exporter's series, joined by GPU UUID.",
    panels=(
        number("Ranks connected", f"sum(sentinel_rank_up{_RUN})", unit="none"),
        number("Slowest over mean", f"max({_SLOWER})", unit="percentunit", limits=alarming(above=1.2)),
        number("Furthest behind", f"max({_BEHIND})", unit="none", description="Steps."),
        number("Longest stall", f"max(sentinel_stalled_seconds{_RUN})", unit="s"),
        number("Fullest GPU", f"max(sentinel_gpu_memory_used_bytes / sentinel_gpu_memory_total_bytes{_GPU})",
               unit="percentunit", limits=alarming(above=0.95)),
        number("Hottest GPU", f"max({_gpu('temperature_celsius')})", unit="celsius", limits=alarming(above=85)),
        row("Stragglers"),
        Panel(title="Step time", unit="s", least=0, queries=make_queries((f"sentinel_step_seconds{_RUN}", _BY_RANK))),
        Panel(
            title="Over the mean of the ranks", unit="percentunit",
            description="A rank above the others holds all of them up.",
            queries=make_queries((_SLOWER, _BY_RANK)),
        ),
        Panel(
            title="Waiting for data", unit="s", least=0,
            queries=make_queries((f"sentinel_data_seconds{_RUN}", _BY_RANK)),
        ),
        Panel(title="Steps behind the first", unit="none", queries=make_queries((_BEHIND, _BY_RANK))),
        Panel(
            title="Without progress", unit="s", least=0,
            queries=make_queries(
                (f"sentinel_stalled_seconds{_RUN}", _BY_RANK),
                (f"min(sentinel_stall_limit_seconds{_RUN} > 0)", "limit"),
            ),
        ),
        Panel(title="Loss", queries=make_queries((f"sentinel_loss{_RUN}", _BY_RANK))),
        row("Memory"),
        Panel(
            title="Allocated", unit="bytes", least=0,
            queries=make_queries((f"sentinel_memory_allocated_bytes{_RUN}", _BY_RANK)),
        ),
        Panel(
            title="Reserved", unit="bytes", least=0,
            queries=make_queries((f"sentinel_memory_reserved_bytes{_RUN}", _BY_RANK)),
        ),
        Panel(
            title="Fragmentation", unit="percentunit", least=0,
            description="Free pieces of split blocks, of all that is reserved: memory that fits nothing.",
            queries=make_queries(
                (f"sentinel_memory_inactive_split_bytes{_RUN} / sentinel_memory_reserved_bytes{_RUN}", _BY_RANK)
            ),
        ),
        Panel(
            title="Resident set", unit="bytes", least=0,
            queries=make_queries((f"sentinel_rss_bytes{_RUN}", _BY_RANK)),
        ),
        Panel(
            title="Cache flushes and out-of-memory errors", unit="none", least=0,
            queries=make_queries(
                (f"increase(sentinel_run_allocation_retries_total{_RUN}[5m])", "flushes after a failed cudaMalloc"),
                (f"increase(sentinel_run_out_of_memory_errors_total{_RUN}[5m])", "out of memory"),
            ),
        ),
        Panel(
            title="Host memory that can be had", unit="bytes", least=0,
            queries=make_queries((f"sentinel_host_memory_available_bytes{_NODE}", "{{hostname}}")),
        ),
        row("GPUs"),
        Panel(
            title="Utilization", unit="percentunit", least=0,
            queries=make_queries((_gpu("utilization_ratio"), _BY_GPU)),
        ),
        Panel(title="Memory in use", unit="bytes", least=0, queries=make_queries((_gpu("memory_used_bytes"), _BY_GPU))),
        Panel(title="Temperature", unit="celsius", queries=make_queries((_gpu("temperature_celsius"), _BY_GPU))),
        Panel(title="Power", unit="watt", least=0, queries=make_queries((_gpu("power_watts"), _BY_GPU))),
        Panel(
            title="Held down", kind="status-history", unit="none", description="By heat, or by the board itself.",
            queries=make_queries(
                (_gpu("throttled_thermal"), "heat, " + _BY_RANK), (_gpu("throttled_hardware"), "board, " + _BY_RANK)
            ),
        ),
        Panel(
            title="Errors in an hour", unit="none", least=0,
            queries=make_queries(
                (_count_over_hour("ecc_uncorrected"), "ECC, " + _BY_RANK),
                (_count_over_hour("pcie_replays"), "PCIe replays, " + _BY_RANK),
                (_count_over_hour("nvlink_errors"), "NVLink, " + _BY_RANK),
            ),
        ),
        row("DCGM"),
        Panel(
            title="Tensor cores active", unit="percentunit", least=0,
            description="Needs dcgm-exporter, scraped by the same Prometheus.",
            queries=make_queries((f"DCGM_FI_PROF_PIPE_TENSOR_ACTIVE{_GPU}", _BY_RANK)),
        ),
        Panel(
            title="Device memory active", unit="percentunit", least=0,
            queries=make_queries((f"DCGM_FI_PROF_DRAM_ACTIVE{_GPU}", _BY_RANK)),
        ),
        Panel(title="XID", unit="none", queries=make_queries((f"DCGM_FI_DEV_XID_ERRORS{_GPU}", _BY_RANK))),
        row("Where they run"),
        Panel(
            title="Ranks", kind="table", width=12, unit="none", hidden=("run", "Value"),
            queries=make_queries((f"sentinel_rank_info{_RUN}", "")),
        ),
        Panel(
            title="Their GPUs", kind="table", width=12, unit="none", hidden=("run", "Value"),
            queries=make_queries((f"sentinel_rank_gpu_info{_RUN}", "")),
        ),
    ),
)  # fmt: skip
