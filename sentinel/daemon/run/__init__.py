"""One run under watch: what comes in of it, what its rules say of that, and what is done."""
