"""The rollout rank: one engine, its local batches, and the trajectories in flight."""
