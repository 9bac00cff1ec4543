"""`sentinel demo`: two runs of one script beside each other, or a job over several nodes, and what came of them."""
