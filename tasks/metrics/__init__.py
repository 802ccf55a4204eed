"""Metrics: how good the answers to a task are."""
