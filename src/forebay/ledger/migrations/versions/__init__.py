"""One script a change, in order."""
