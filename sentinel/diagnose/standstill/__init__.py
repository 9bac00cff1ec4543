"""Ranks that stand still: their stacks, the operations they wait in, and who holds up whom."""
