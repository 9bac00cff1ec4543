"""Rule files: read, checked and compiled; their schema for editors and their reference for the docs."""
