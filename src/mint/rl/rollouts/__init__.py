"""Rollouts: completions and episodes, sampled and graded."""
