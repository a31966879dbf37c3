"""Who takes part in private inference: the server that owns the weights, the client that owns the input."""
