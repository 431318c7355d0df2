"""Machines that ssh reaches, without Slurm: `laminar launch`, who runs where, and what runs on each."""
