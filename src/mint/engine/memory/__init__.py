"""What fits into the memory of a device: rows of training, sequences and prompt tokens of sampling."""
