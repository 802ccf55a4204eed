"""The tasks of DATASET_VALS: their data, texts and metrics."""
