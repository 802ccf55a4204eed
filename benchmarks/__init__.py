"""What benchmark_t5.py measures: a module for each part of the toolkit."""
