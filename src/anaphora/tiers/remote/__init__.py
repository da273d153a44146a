"""Stores shared between servers: Valkey and Redis, Mooncake Store, and whatever outside packages register."""
