"""How a daemon is asked: the command line's questions, HTTP, metrics, traces."""
