"""Hyper-parameter search by sweep files: the study, its trials, its report."""
