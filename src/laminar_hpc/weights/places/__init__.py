"""Weights for relays at other places, over networks that are neither trusted nor fast."""
