"""Tools beside training: searches, tables and pictures of runs, the size of the house. No training needs them."""
