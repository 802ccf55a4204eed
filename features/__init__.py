"""What not every training needs: one folder for each feature. Who deletes a folder deletes the feature, and no more."""
