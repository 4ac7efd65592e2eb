"""Decides which sequences a step runs, and with how many drafts."""
