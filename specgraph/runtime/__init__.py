"""Drives a compiled step over requests."""
