"""Trajectories of several turns in a simulation: what each does, and what its environment takes for it."""
