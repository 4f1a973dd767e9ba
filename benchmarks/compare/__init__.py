"""Comparisons: each contender runs in its own process and environment, and they take turns in one run."""
