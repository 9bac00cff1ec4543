"""The messages between a job's nodes and the decisions made from them, without network and clock: can be simulated."""
