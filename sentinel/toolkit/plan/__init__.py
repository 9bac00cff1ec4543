"""Predicts what a training run will need of each GPU: by arithmetic, without a GPU.

quantity    "80GB", "7.5e9": read and written
recipe      bytes per parameter, by precision and optimizer
subject     what is trained: parameters, gathered unit, activations
transformer activations of a transformer by formula
configfile  a Hugging Face config.json as a subject
tracing     a module as a subject: one step on fake tensors (the only file that needs torch)
strategies  what is stored where under DDP, ZeRO, FSDP, offload
ranking     which of them fit, the fastest first
"""
