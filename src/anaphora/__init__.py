"""Anaphora: an LLM inference server and toolkit built around the KV cache."""

from anaphora.geometry.size import KVCacheSize, kv_cache_size

__all__ = ["KVCacheSize", "kv_cache_size"]
__version__ = "0.1.0"
