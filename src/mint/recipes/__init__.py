"""Runnable recipes, one readable file each. The library never imports them; copy one and bend it."""
