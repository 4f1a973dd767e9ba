"""Breaks running services on purpose, and checks that they lose nothing: `mint chaos`."""
