"""From a step's values to the daemon's socket: records, their queue, and the thread that sends."""
