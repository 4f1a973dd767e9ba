"""What sampling and training take of memory, and what a bound on it costs."""
