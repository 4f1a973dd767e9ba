"""The decoder: its configuration, weights and layers, on packed rows of token ids."""
