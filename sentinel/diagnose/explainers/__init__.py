"""Explain each alert: a function from its evidence to the likely cause, in the module of its topic."""

from sentinel.diagnose.explainers import (  # noqa: F401  # imported to register themselves
    batches,
    bugs,
    depth,
    drift,
    formats,
    hang,
    hardware,
    learning,
    lost,
    memory,
    out_of_memory,
    precision,
    ranks,
    replicas,
    stability,
    stale_snapshots,
    straggler,
    throughput,
)
