"""Helpers with which several passes find their patterns, and give modules state."""
