"""What an incident asks for: where a NaN came from, which objects grow, what fills the memory."""
