"""Relays and the controller: how a relay at another place finds the gate that it pulls weights from."""

import msgspec

from laminar_hpc.line.messages.data import Message


class GateAddress(msgspec.Struct):
    """Where a gate listens, and the CURVE keys (z85) that let a relay in; new with every gate."""

    host: str
    port: int
    server_public: str
    client_public: str
    client_secret: str


class OpenGate(Message):
    """To a relay at the trainer's place: relays at other places will pull weights from its slots."""


class GateOpened(Message):
    """From that relay: its gate listens here. Asked again it answers the same."""

    address: GateAddress


class JoinGate(Message):
    """To one relay of a place: pull every publication from this gate, in place of what it received over so
    far. If it pulls from there already it goes on."""

    epoch: int
    peer: str
    address: GateAddress
