"""Text from any source: files, the Hub, streams, tokenizers."""
