"""Responses as columns: a binary layout (layout.py), files that hold it (writer.py, reader.py)."""
