"""What a stored form of keys and values changes in a model's answers, and what it costs: `anaphora quality`."""
