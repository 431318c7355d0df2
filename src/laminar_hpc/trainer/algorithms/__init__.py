"""Advantages and losses: small pure functions, each with its source."""
