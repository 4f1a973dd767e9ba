"""The database, the journal and the files of a data directory. The only room that knows SQL."""
