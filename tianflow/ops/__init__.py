"""Equations as pure functions on tensors: returns, losses, distributions, transforms."""
