"""Trains the small models of this repository: a target from text, and a draft that is distilled from it."""
