"""Pure functions on tensors: returns, losses, distributions, transforms."""
