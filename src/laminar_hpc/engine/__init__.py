"""What an engine is (interface.py), which kind a run has (factory.py), and the two kinds."""
