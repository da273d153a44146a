"""HTTP: OpenAI routes, streaming, metrics."""
