"""What the user's loop does: backward passes, losses, batches, clipping, and where in the code it is."""
