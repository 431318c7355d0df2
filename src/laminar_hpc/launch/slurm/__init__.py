"""Slurm: one job per failure domain. `laminar submit`, what runs on each node of a job, `laminar
slurm check`.

The scripts themselves are in slurm/.
"""
