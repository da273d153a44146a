"""What a cache would have done on recorded traffic: trace readers, simulator, LRU curve, optimum. No torch."""
