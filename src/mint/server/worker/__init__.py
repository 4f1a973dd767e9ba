"""The engine's threads: run accepted requests, and recover models after a restart."""
