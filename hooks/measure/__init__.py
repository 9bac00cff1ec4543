"""The numbers of a step: statistics of gradients, by compiled kernels where there are any, and the probes."""
