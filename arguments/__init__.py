"""The flags of the scripts, grouped by theme, and what is checked of them before any work."""
