"""Runs compiled steps over the state of a decoder."""
