"""The numbers of a step: statistics of gradients, by kernels where there are any, and the probes."""
