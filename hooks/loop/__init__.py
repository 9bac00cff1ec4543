"""What the user's loop does: backward passes, losses, batches, clipping, and where in its code it is."""
