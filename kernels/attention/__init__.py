"""Attention without a cache for tracing, over a paged cache for decoding, and the angles of rotary embeddings."""
