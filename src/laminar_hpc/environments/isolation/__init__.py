"""What the kernel offers to keep processes apart, for the sandbox and reward workers. Imports little."""
