"""Which tokens of a text are masked, and how training rows are built."""
