"""OpenTelemetry's protocol: metrics, log records and spans as requests. Needs the extra `otlp`."""
