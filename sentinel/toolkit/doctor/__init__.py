"""Finds problems before a training run meets them: judged from facts, without torch.

finding      what a finding is; findings.yaml has its words
environment  the machine and its variables
driver       whether NVIDIA's driver suits torch's CUDA
model        model, optimizer and data, as `sentinel.hooks.examine` saw them
loop         the order of the loop's calls
command      runs a training command under examination
"""
