"""What several passes use to find their patterns, and to give modules state."""
