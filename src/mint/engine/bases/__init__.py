"""The base models of an engine: on mint's decoder, and on the modules of transformers."""
