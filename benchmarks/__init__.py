"""Benchmarks of glocal; benchmarks/README.md lists their commands and results. `make bench` runs `benchmarks.step`."""
