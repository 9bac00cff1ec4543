"""Composes everything for `attach`: a run's optimizers, its sender, and the commands it gets."""
