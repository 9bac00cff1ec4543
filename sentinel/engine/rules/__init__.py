"""Rule files: reading, checks and compilation; their schema for editors and their reference for the docs."""
