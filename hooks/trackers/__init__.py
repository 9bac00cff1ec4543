"""Marks incidents in the trackers in which the script has a run open: W&B, MLflow, Trackio, TensorBoard.

A tracker that the script does not use is never imported. See `tracker.py` for the protocol.
"""
