"""The dashboard of one run: whether it is healthy, how fast it is, what happened."""

from __future__ import annotations

from sentinel.toolkit.grafana.panels import Dashboard, Panel, alarming, make_queries, number, row

_RUN = '{run="$run"}'

DASHBOARD = Dashboard(
    uid="sentinel-overview",
    title="Sentinel / Run",
    description="Loss, gradient norm, loss scale, learning rate, throughput and incidents of one run.",
    panels=(
        number("Loss", f"sentinel_run_loss{_RUN}"),
        number("Step", f"max(sentinel_step{_RUN})", unit="none"),
        number("Steps per second", f"rate(sentinel_run_steps_total{_RUN}[1m])"),
        number("Open incidents", f"sum(sentinel_incidents_firing{_RUN}) or vector(0)", unit="none",
               limits=alarming(above=1)),
        number("Ranks connected", f"sum(sentinel_rank_up{_RUN})", unit="none"),
        number("Last step", f"time() - sentinel_last_step_timestamp_seconds{_RUN}", unit="s",
               description="Since the newest step ended."),
        row("Learning"),
        Panel(
            title="Loss", width=12, height=10,
            queries=make_queries((f"sentinel_run_loss{_RUN}", "loss")),
        ),
        Panel(
            title="Gradient norm", width=12, height=10, logarithmic=True,
            description="Over all parameters (L2). Applied: what the optimizer gets, after clipping.",
            queries=make_queries(
                (f"sentinel_run_grad_norm{_RUN}", "before clipping"),
                (f"sentinel_run_grad_norm_applied{_RUN}", "applied"),
                (f"sentinel_run_clip_limit{_RUN}", "limit"),
            ),
        ),
        Panel(
            title="Learning rate",
            queries=make_queries((f"sentinel_run_learning_rate{_RUN}", "largest of the groups")),
        ),
        Panel(
            title="Loss scale", logarithmic=True,
            description="GradScaler's, or the optimizer's own. It halves at each step that overflows.",
            queries=make_queries((f"sentinel_run_loss_scale{_RUN}", "scale")),
        ),
        Panel(
            title="Withheld steps", unit="percentunit", least=0,
            description="Share of the scrapes of five minutes that saw a step withheld by GradScaler.",
            queries=make_queries((f"avg_over_time(sentinel_run_step_skipped{_RUN}[5m])", "withheld")),
        ),
        row("Throughput"),
        Panel(
            title="Steps per second", least=0,
            queries=make_queries((f"rate(sentinel_run_steps_total{_RUN}[1m])", "steps")),
        ),
        Panel(
            title="Where a step's time goes", unit="s", stacked=True, least=0,
            description="Of the slowest rank in each part.",
            queries=make_queries(*(
                (f"sentinel_run_{part}_seconds{_RUN}", label)
                for part, label in (("data", "waiting for data"), ("forward", "forward"), ("backward", "backward"),
                                    ("optimizer", "optimizer"), ("other", "other"))
            )),
        ),
        Panel(
            title="Memory, the fullest rank", unit="bytes", least=0,
            queries=make_queries(
                (f"sentinel_run_rss_bytes{_RUN}", "resident set"),
                (f"sentinel_run_memory_allocated_bytes{_RUN}", "device, allocated"),
                (f"sentinel_run_memory_reserved_bytes{_RUN}", "device, reserved"),
            ),
        ),
        row("Incidents"),
        Panel(
            title="Open", kind="status-history", width=12, unit="none",
            queries=make_queries((f"sentinel_incidents_firing{_RUN}", "{{alert}}")),
        ),
        Panel(
            title="All of this run", kind="table", width=12, unit="none", hidden=("run",),
            description="`sentinel incidents` shows each with its cause and what to do.",
            queries=make_queries((f"sentinel_incidents_total{_RUN}", "")),
        ),
        Panel(
            title="Rollbacks", width=12, unit="none", least=0,
            queries=make_queries((f"sentinel_rollbacks_total{_RUN}", "rollbacks")),
        ),
        Panel(
            title="Rules by state", width=12, unit="none", stacked=True,
            queries=make_queries((f"sentinel_rules{_RUN}", "{{state}}")),
        ),
    ),
)  # fmt: skip
