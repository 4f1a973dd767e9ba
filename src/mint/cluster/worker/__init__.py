"""A machine that joins a server to sample for it (`mint worker --join URL`)."""
