"""`mint train` and `mint demo`: arguments and data in, a recipe run, a report out."""
