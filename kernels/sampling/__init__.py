"""Drawing tokens from logits with counter-based noise."""
