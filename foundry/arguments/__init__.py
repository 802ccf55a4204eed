"""The flags of the scripts, grouped by theme, and their checks, which run before any work."""
