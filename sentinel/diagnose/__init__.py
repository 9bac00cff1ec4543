"""From an incident and its evidence to a case: the most likely cause, and how certain it is."""
