"""Data sets that recipes generate or carry."""
