"""Products with weights that are stored in few bits, and the formats of such weights."""
