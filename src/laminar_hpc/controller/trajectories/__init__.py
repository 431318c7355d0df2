"""Trajectories as the controller sees them: who has which, what is granted, moved, scored and lost."""
