"""One watched run: what arrives from it, what its rules find in that, and what is done."""
