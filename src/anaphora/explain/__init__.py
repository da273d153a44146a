"""Why a prompt missed: what was known of it, where it parts from the nearest one, what stands there. No torch."""
