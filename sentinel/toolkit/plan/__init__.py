"""What a training run needs of each GPU before it runs: arithmetic, and no GPU.

quantity    "80GB", "7.5e9": read and written
recipe      bytes a parameter costs, by precision and optimizer
subject     what is trained: parameters, gathered unit, activations
transformer activations of a transformer by formula
configfile  a Hugging Face config.json as a subject
tracing     a module as a subject: one step on fake tensors (the only file that needs torch)
strategies  what lies where under DDP, ZeRO, FSDP, offload
ranking     which of them fit, the fastest first
"""
