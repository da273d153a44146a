"""Where keys and values lie: the paged tensors."""
