"""Emulated engines: no model, no weights, no GPU; real workers, processes, sockets and messages around the
simulator's costs."""
