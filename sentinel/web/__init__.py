"""HTTP: metrics, health, reload, the API."""
