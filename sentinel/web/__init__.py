"""The HTTP server: metrics, health, reload, the API, the page."""
