"""Studies: each made a table of results/, and makes it again by its command."""
