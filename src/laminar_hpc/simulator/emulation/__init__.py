"""Runs with emulated engines (engine/emulated/): real workers, processes, sockets and messages, stand-ins for
trainer and relay."""
