"""What the answers to a task are worth."""
