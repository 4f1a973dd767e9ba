"""Weights on disk: the folders of base models, the formats that mint writes, and files from untrusted sources.

Knows folders, files and numpy arrays; nothing of torch, requests or checkpoints.
"""
