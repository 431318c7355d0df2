"""Every message between processes, as msgspec structs (msgpack on the wire); nothing else crosses.

One file per conversation: membership, rollouts, moves, training, publication, chain. data.py holds what they
carry, wire.py turns them into frames and back. Times are seconds since the Unix epoch; weight ids are
counters of the store (0 = the user's model directory).
"""
