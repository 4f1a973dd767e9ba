"""Whether results depend on the batch, and how far sampler and trainer differ."""
