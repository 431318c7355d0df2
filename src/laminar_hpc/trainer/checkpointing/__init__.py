"""How a checkpoint gets to the disk while training goes on; trainer/checkpoint.py is the door."""
