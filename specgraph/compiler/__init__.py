"""Runs the passes over a program and checks what they did."""
