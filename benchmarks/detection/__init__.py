"""What the diagnosis, the lint and the sandbox find, and what they miss."""
