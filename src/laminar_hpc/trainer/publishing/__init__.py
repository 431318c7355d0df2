"""Publishing: the trainer's live weights leave for the relays while the trainer goes on."""
