"""Attention: dense for tracing, paged for decoding, and the rotary embedding in front of it."""
