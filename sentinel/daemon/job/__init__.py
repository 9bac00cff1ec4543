"""A run as part of a job over several nodes, and the supervisors (`sentinel run`) of its ranks."""
