"""Where settings become objects: the service in this process, and the servers behind a socket."""
