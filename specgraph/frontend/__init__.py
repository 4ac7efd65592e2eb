"""Traces a model of transformers, and makes the first program from the traces."""
