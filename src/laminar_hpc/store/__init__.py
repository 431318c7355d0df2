"""What a run has on disk: the database and its journal, payload files, the archive, checkpoints, and the
audit of them all."""
