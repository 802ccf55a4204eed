"""What python -m benchmarks measures: a module for each part of the toolkit."""
