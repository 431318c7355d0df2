"""What a run has on disk: database, journal, payload files, archive, checkpoints, and their audit."""
