"""Frozen matrices whose numbers take 4 or 8 bits."""
