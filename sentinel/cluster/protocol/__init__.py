"""What the nodes of a job say to each other, and what follows from it: no network, no clock, so it can be simulated."""
