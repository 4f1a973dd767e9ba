"""Work that pages start: searches over checkpoints, in threads, and `mint` commands, in processes."""
