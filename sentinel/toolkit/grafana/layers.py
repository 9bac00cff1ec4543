"""The dashboard of the layers of one run: how their gradient norms are distributed, and which stand out."""

from __future__ import annotations

from sentinel.toolkit.grafana.panels import Dashboard, Panel, alarming, make_queries, number, row

_RUN = '{run="$run"}'

DASHBOARD = Dashboard(
    uid="sentinel-layers",
    title="Sentinel / Layers",
    description="Gradient norms of a run's layers: all of them as a heat map, by name the ten that stand out.",
    panels=(
        number("Layers", f"sentinel_layers{_RUN}", unit="none"),
        number("Smallest norm", f"sentinel_layers_grad_norm_min{_RUN}"),
        number("Median norm", f"sentinel_layers_grad_norm_median{_RUN}"),
        number("Largest norm", f"sentinel_layers_grad_norm_max{_RUN}"),
        number("Fastest growth", f"max(sentinel_layer_grad_growth_ratio{_RUN})", unit="none",
               description="Over the layer's own median of its last 15 samples.", limits=alarming(above=10)),
        number("Layers with NaN or infinity", f"max(sentinel_layers_nonfinite{_RUN})",
               unit="none", limits=alarming(above=1)),
        row("All layers"),
        Panel(
            title="Layers by gradient norm", kind="heatmap", width=16, height=12,
            description="How many layers have which norm, by decades. What sinks dies, what rises blows up.",
            queries=make_queries((f"sentinel_layers_by_grad_norm_bucket{_RUN}", "")),
        ),
        Panel(
            title="Gradient norm", logarithmic=True, height=12,
            queries=make_queries(
                (f"sentinel_layers_grad_norm_max{_RUN}", "largest"),
                (f"sentinel_layers_grad_norm_median{_RUN}", "median"),
                (f"sentinel_layers_grad_norm_min{_RUN}", "smallest"),
            ),
        ),
        row("Layers that stand out"),
        Panel(
            title="Largest norms, over time", kind="status-history", width=24, height=10,
            queries=make_queries((f"topk(10, sentinel_layer_grad_norm{_RUN})", "{{layer}}")),
        ),
        Panel(
            title="Largest norms, now", kind="bargauge", width=12, height=10,
            queries=make_queries((f"sort_desc(sentinel_layer_grad_norm{_RUN})", "{{layer}}")),
        ),
        Panel(
            title="Fastest growth, now", kind="bargauge", width=12, height=10, unit="none",
            limits=(("green", None), ("orange", 3), ("red", 10)),
            queries=make_queries((f"sort_desc(sentinel_layer_grad_growth_ratio{_RUN})", "{{layer}}")),
        ),
        Panel(
            title="Growth", logarithmic=True, width=12, height=10,
            description="Gradient norm over its own median of the last 15 samples.",
            queries=make_queries((f"topk(10, sentinel_layer_grad_growth_ratio{_RUN})", "{{layer}}")),
        ),
        Panel(
            title="NaN and infinite elements", width=12, height=10, unit="none",
            queries=make_queries((f"sentinel_layer_nonfinite_elements{_RUN}", "{{layer}}")),
        ),
    ),
)  # fmt: skip
