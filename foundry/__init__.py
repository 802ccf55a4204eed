"""The core: what every training needs. It finds the features that are there and knows none by name."""
