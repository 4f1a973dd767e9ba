"""The SDK: one session with a server (or with the service in this process), and the clients that speak over it.

Knows the wire and nothing behind it: no torch, no server.
"""
