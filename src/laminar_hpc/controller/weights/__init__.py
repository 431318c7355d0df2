"""Weight ids, the chains of relays, and the probes of each weight id."""
