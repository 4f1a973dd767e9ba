"""Calls of the user's functions: many at once, each with a time-out."""
