"""How the client reaches a server: the transport, requests that are sent again, and the answers."""
