"""The monitor of one optimizer: its hooks, which steps are measured in full, and which losses look odd."""
