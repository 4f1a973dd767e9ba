"""A copy of a data directory in object storage: made beside a running service, and brought back."""
