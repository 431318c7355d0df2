"""What users call: the commands, and the agents that start the ranks here, over ssh and under Slurm."""
