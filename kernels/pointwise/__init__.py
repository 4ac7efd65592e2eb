"""Chains of functions of single elements, in one kernel."""
