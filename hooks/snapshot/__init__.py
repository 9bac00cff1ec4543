"""State of model, optimizer and loop, copied into host memory and to disk, and put back."""
