"""Where models come from: a folder, a GGUF file, the hub, a package; fetched, checked, converted, kept."""
