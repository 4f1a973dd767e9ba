"""What is stored, on a server or in a data directory: the commands `mint runs|checkpoints|sessions|models`."""
