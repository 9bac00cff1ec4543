"""Identity of the rank, the budget, and what keeps our faults and memory out of the user's way."""
