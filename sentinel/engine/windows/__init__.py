"""What a rule remembers of a series: windows over its samples, and statistics of them."""
