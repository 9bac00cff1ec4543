"""What `sentinel doctor` runs inside a training script: its model, loop and settings, recorded."""
