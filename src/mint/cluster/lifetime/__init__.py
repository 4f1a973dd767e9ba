"""How long processes live in a Ray that outlives the server, and how the next start of the server takes them over."""
