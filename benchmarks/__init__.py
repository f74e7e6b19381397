"""Benchmarks: what a model-step costs, beside a hand-written loop and beside Avalanche. `make bench` runs them."""
