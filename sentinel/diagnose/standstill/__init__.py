"""Find out why ranks stand still: their stacks, the operations they wait in, and which rank holds up which."""
