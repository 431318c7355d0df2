"""Slurm: one job per failure domain. `laminar submit`, and what runs on each node of a job.

The scripts themselves are in slurm/.
"""
