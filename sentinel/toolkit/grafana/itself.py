"""The dashboard of Sentinel itself: what it costs, and whether it sees, stores and notifies."""

from __future__ import annotations

from sentinel.toolkit.grafana.panels import Dashboard, Panel, alarming, make_queries, number, row

_DAEMON = "{{instance}}"
_RUN = "{{run}}"

DASHBOARD = Dashboard(
    uid="sentinel-itself",
    title="Sentinel / Itself",
    description="All daemons that this Prometheus scrapes: their cost, their history, their notifications.",
    by_run=False,
    panels=(
        number("Daemons", 'count(up{job="sentinel"} == 1)', unit="none"),
        number("Runs", "count(sentinel_run_info)", unit="none"),
        number("Ranks connected", "sum(sentinel_rank_up)", unit="none"),
        number("Faults of its own", "sum(sentinel_daemon_faults_total)", unit="none", limits=alarming(above=1)),
        number("Histories not written", "sum(sentinel_history_failing)", unit="none", limits=alarming(above=1)),
        number("Never delivered", "sum(sentinel_notifications_given_up_total) or vector(0)", unit="none",
               limits=alarming(above=1)),
        row("Cost"),
        Panel(
            title="Of the training loops' time", unit="percentunit", stacked=True, least=0,
            description="As each rank's governor has it; the mean of the ranks.",
            queries=make_queries(("avg by (part) (sentinel_cost_ratio)", "{{part}}")),
        ),
        Panel(
            title="Sampling", unit="none",
            description="A tier is sampled every so many steps: the costlier it is, the more rarely.",
            queries=make_queries(("max by (run, tier) (sentinel_sampling_spacing_steps)", "tier {{tier}}, {{run}}")),
        ),
        Panel(
            title="Daemon's CPU", unit="percentunit", least=0, description="Of one core.",
            queries=make_queries(("rate(sentinel_daemon_cpu_seconds_total[1m])", _DAEMON)),
        ),
        Panel(
            title="Daemon's memory", unit="bytes", least=0,
            queries=make_queries(("sentinel_daemon_resident_memory_bytes", _DAEMON)),
        ),
        Panel(
            title="Time of a scrape", unit="s", least=0,
            queries=make_queries(('scrape_duration_seconds{job="sentinel"}', _DAEMON)),
        ),
        Panel(
            title="Rules applied per second", least=0,
            queries=make_queries(("rate(sentinel_rule_evaluations_total[1m])", _RUN)),
        ),
        row("What it sees"),
        Panel(
            title="Steps per second", least=0, queries=make_queries(("rate(sentinel_run_steps_total[1m])", _RUN)),
        ),
        Panel(
            title="Steps dropped per second", least=0, description="By a rank whose queue was full.",
            queries=make_queries(("sum by (run) (rate(sentinel_steps_dropped_total[1m]))", _RUN)),
        ),
        Panel(
            title="Rules by state", unit="none", stacked=True,
            queries=make_queries(("sum by (state) (sentinel_rules)", "{{state}}")),
        ),
        row("What it keeps"),
        Panel(title="Size of histories", unit="bytes", least=0, queries=make_queries(("sentinel_history_bytes", _RUN))),
        Panel(
            title="Rows given up", unit="none", least=0, description="As the history could not be written.",
            queries=make_queries(
                ("sum by (run, kind) (sentinel_history_lost_writes_total) or vector(0)", "{{run}} {{kind}}")
            ),
        ),
        Panel(
            title="Rule files", kind="status-history", unit="none",
            description="1: could be read when they were read last.",
            queries=make_queries(("sentinel_config_last_reload_successful", _DAEMON)),
        ),
        row("Whom it tells"),
        Panel(
            title="Messages taken", unit="none", least=0,
            queries=make_queries(("sum by (receiver) (sentinel_notifications_total)", "{{receiver}}")),
        ),
        Panel(
            title="Failed attempts", unit="none", least=0,
            queries=make_queries(
                ("sum by (receiver, reason) (increase(sentinel_notifications_failed_total[5m]))",
                 "{{receiver}}: {{reason}}")
            ),
        ),
        Panel(
            title="Waiting", unit="none", least=0,
            queries=make_queries(("sum by (receiver) (sentinel_notifications_pending)", "{{receiver}}")),
        ),
        Panel(
            title="Versions", kind="table", width=24, height=5, unit="none", hidden=("Value",),
            queries=make_queries(("sentinel_build_info", "")),
        ),
    ),
)  # fmt: skip
