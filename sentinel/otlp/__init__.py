"""OpenTelemetry's protocol: metrics, log records and spans as its requests. Needs the extra `otlp`."""
