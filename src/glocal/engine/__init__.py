"""The engine: trains cohorts of runs with one step function, and measures them."""
