"""Two processes that pass weights, over NCCL or host memory, and what orders a device's work."""
