"""Tasks from files and from other packages."""
