"""What is needed to see a hang from outside: heartbeat, stacks, and the record of collectives."""
