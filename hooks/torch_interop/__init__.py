"""Reads torch's layers, shards, wrappers and tensors: the only place for its private names."""
