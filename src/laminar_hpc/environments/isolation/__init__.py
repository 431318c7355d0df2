"""What the kernel offers to keep processes apart, for the sandbox and for reward workers. Imports nothing
heavy."""
