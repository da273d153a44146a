"""The engine's side of the tiers: what to load, what to store, and when it is worth it."""
