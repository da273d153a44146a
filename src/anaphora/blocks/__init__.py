"""Who owns which block: pool, chained hashes, prefix index, eviction, block tables. No torch."""
