"""Models whose weights are stored in a scheme: their layers, and how they are made, saved and loaded."""
