"""What does not fit is refused, and the trajectory goes on by re-prefill."""

from laminar_hpc.config.errors import LaminarError


class KvRefused(LaminarError):
    """A move that cannot be made or that failed: one line with what does not fit, or which side ended it."""
