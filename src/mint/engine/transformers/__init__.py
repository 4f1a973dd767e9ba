"""Base models on the modules of transformers: every causal model that mint's own decoder does not know."""
