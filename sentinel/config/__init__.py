"""Settings and receivers, as the user writes them: read, checked, and refused in words."""
