"""Compiles the variants of a step that requests ask for, each when it is first needed."""
