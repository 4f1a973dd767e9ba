"""The command line: arguments in, one call, something printed."""
