"""How fast and how well runs learn: against TRL, and by setting."""
