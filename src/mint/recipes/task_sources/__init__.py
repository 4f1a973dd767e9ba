"""Tasks that other packages or files provide."""
