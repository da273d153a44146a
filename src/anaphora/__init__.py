"""Anaphora: an LLM inference server and toolkit built around the KV cache."""

__version__ = "0.1.0"
