"""Search: the next jobs of a sweep are proposed from those that ended."""
