"""A checkpoint for others: exports, model cards, uploads to the Hub."""
