"""Sums whose bits do not depend on who computes which part: of gradients over micro-batches, of squares for norms."""
