"""Reads the files of draft checkpoints, and fills the module of a head from them."""
