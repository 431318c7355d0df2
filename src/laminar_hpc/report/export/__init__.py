"""`laminar export`: a run's scored trajectories in one file. Reads files only, of a run that goes on, has
ended or died; imports no torch."""
