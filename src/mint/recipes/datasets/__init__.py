"""Data sets that the recipes generate."""
