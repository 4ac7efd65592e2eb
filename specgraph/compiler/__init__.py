"""Compiles a model into a decoder: runs the passes over the program, and checks their results."""
