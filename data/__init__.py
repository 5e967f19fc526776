"""Text and sums: how inputs are made, hidden, and counted as good."""
