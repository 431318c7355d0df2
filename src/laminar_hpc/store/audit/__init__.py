"""`laminar audit`: proves from a run's records that nothing was lost and nothing trained twice. Reads files
only, of a run that goes on, has ended or died; imports no torch."""
