"""Goes back to a snapshot at the exit of a step, on all ranks or on none."""
