"""What fits: geometry and hardware -> what an engine will allot. No torch."""
