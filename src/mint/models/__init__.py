"""Weights on disk: which folder a name stands for, what lies in it, and the formats that mint writes.

Knows nothing of torch, requests or checkpoints' names: folders, files and numpy arrays only.
"""
