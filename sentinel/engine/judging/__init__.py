"""Rules at work: whether each fires, incidents, and the state that is kept of them."""
