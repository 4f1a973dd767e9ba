"""The engine's thread: runs accepted requests, and recovers models after a restart."""
