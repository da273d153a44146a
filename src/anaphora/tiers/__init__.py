"""Where blocks go when they leave the pool: RAM, disk, a shared store. Bytes only; no torch."""
