"""The memory of rules about a series: windows over its samples, and statistics of them."""
