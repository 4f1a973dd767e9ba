"""What waits for the engine: accepted requests, the order in which they run, and their futures."""
