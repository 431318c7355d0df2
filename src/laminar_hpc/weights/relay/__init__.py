"""The relay rank: it receives each publication into shared memory, and passes it on."""
