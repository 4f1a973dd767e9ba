"""Limits that follow from a device's memory: rows of training, sequences and prompt tokens of sampling."""
