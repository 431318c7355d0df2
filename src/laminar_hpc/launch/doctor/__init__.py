"""`laminar doctor`: what this machine can run, one line for each thing, with cures."""
