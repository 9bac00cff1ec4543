"""Snapshots of PyTorch's CUDA caching allocator, read without torch and without trust.

reading     the file: a pickle that may hold no class, within bounds
occupancy   what each GPU's segments hold: live, waiting, free in pieces, free whole
timeline    the same at an earlier moment, at the peak above all
stacks      who holds it, and whose share grows from snapshot to snapshot
findings    what to set, and what to look at
"""
