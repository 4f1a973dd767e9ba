"""Sampling: sequences that join and leave, their keys and values, and the choice of each token."""
