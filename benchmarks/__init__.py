"""Benchmarks of Forebay beside real peers. Each module with a command runs as ``python -m benchmarks.NAME``."""
