"""``python -m specgraph bench``: times against the bytes that must move."""
