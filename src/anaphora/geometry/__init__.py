"""What one token costs: config.json -> ModelGeometry. No torch."""
