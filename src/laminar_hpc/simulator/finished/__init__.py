"""Finished live runs: measured, predicted from what was measured, and what would have been faster."""
