"""The names of metrics in Prometheus, and rules as PromQL."""
