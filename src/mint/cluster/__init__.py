"""Training on several processes with the bits of one: `mint.engine` on the ranks of a Ray cluster."""
