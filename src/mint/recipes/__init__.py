"""Recipes: one readable file each, to copy and change. The library never imports them."""
