"""Decoders that write and read paged KV: the compact one and the transformers way."""
