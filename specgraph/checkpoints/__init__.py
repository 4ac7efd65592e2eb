"""Files of checkpoints: what they hold, and how a head's module is filled from them."""
