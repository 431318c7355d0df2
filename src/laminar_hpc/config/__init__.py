"""The configuration: its schema with bounds, loading with overrides, checks, and derived quantities. It
imports nothing else of the package."""
