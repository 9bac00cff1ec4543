"""Snapshots of PyTorch's CUDA caching allocator, read without torch and without trust in the file.

reading     the file: a pickle that may hold no class, within bounds
occupancy   what each GPU's segments hold: live, waiting, free in pieces, free whole
timeline    the same at an earlier moment, mainly at the peak
stacks      which code holds it, and whose share grows from snapshot to snapshot
findings    what to set, and what to look at
"""
