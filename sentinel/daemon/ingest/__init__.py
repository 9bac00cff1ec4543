"""The daemon's socket: connections of ranks and command lines, their frames, and the share of each user."""
