"""What the daemon gets: records and the thread that sends them; heartbeat and stacks, for a hang."""
