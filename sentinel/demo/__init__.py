"""`sentinel demo`: two runs of one script side by side, or a job over several nodes, and their outcome."""
