"""Puts together the programs that work for a server elsewhere."""
