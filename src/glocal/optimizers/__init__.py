"""Optimisers: small pure objects in the manner of optax."""

from glocal.optimizers.sgd import SGD, Optimizer, apply_update

__all__ = ["SGD", "Optimizer", "apply_update"]
