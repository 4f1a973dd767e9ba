"""Samplers that are other programs, asked over HTTP in vLLM's protocol."""
