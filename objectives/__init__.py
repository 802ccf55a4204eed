"""What is masked of a text, and how training rows are made of it."""
