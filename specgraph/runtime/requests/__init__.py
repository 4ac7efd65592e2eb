"""Turns what a caller passes into checked requests."""
