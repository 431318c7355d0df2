"""Responses as columns: one binary layout (layout.py), the files that hold it (writer.py, reader.py). No
torch, no role."""
