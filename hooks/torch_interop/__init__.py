"""What torch says about layers, shards, wrappers and tensors: the only place for its private names."""
