"""A run is a folder: written while it runs, read in bounded memory while and after it does. Knows no rule of RL."""
