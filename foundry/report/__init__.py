"""What a plan shows of texts and rows; nothing reads it back."""
