"""Sweeps: resolve names to objects, train the requested runs and keep them in a store."""
