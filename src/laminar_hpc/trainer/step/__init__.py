"""One trainer step: from a batch of trajectories to optimizer updates and metrics."""
