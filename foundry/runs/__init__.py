"""What a run prints, writes, tracks and shows."""
