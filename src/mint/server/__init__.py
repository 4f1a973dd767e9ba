"""The service: accepts requests, keeps their order and their durability, and runs the engine.

It sees the engine only through `engine.protocol`; it knows no torch and no client.
"""
