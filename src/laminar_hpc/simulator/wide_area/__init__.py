"""Rollouts in other places than the trainer: links, how weights get there, replicas that get a notice."""
