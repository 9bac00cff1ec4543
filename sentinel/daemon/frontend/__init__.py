"""What is asked of a daemon: the command line's questions, HTTP, metrics, traces."""
