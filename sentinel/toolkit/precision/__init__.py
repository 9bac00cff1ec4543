"""What 16 bits would do, or have done, to a model: read from a checkpoint, or from a run's history.

magnitudes  counts of numbers by their power of two, and which of them each format can hold
advice      findings from magnitudes: what overflows, what vanishes, which scale, which layers
checkpoint  a checkpoint file as magnitudes (the only file that needs torch)
living      a run's history as findings
"""
