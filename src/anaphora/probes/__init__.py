"""The outside view: verify, sweep and doctor, against any OpenAI-compatible endpoint."""
