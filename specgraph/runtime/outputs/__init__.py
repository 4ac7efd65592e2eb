"""Turns what steps emit into the results of a call."""
