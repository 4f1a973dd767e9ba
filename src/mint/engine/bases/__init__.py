"""The base models of an engine: what they have in common, and those on mint's own decoder."""
