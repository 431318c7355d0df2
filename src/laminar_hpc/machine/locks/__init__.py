"""The lock of a folder that several machines see, and how long its holder may be sure of it."""
