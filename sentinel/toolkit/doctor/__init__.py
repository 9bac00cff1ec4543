"""What will bite: judged from facts, without torch.

finding      what a finding is; findings.yaml has its words
environment  the machine and its variables
driver       NVIDIA's driver against torch's CUDA
model        model, optimizer and data, as `sentinel.hooks.examine` saw them
loop         the order in which the loop calls things
command      runs a training command under examination
"""
