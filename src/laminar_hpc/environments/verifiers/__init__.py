"""Environments of the package verifiers, unchanged, as agents by URL: they run in a virtual environment of
their own, whose packages cannot live beside SGLang's. pool.py is the door; rows.py has their tasks."""
