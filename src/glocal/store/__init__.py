"""Finished runs and checkpoints on disk."""
