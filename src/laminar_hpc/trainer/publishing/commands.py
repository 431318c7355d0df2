"""What trainer 0's publisher tells those of the other ranks: one command per chunk, over their exchange."""

from enum import IntEnum
from typing import NamedTuple

from laminar_hpc.trainer.canonical.exchange import Exchange


class PublishingCommand(IntEnum):
    """What to do next."""

    WAIT = 0  # sent while there is nothing to do, so that no rank's bounded wait runs out
    STATE = 1  # all say whether their lanes have links
    BEGIN = 2  # a publication, in chunks of `number` bytes, under `weight_id`
    CHUNK = 3  # pack and send chunk `number` of every lane
    END = 4  # the last chunks leave, and all say what has left
    RELEASE = 5  # the weights may change


class Order(NamedTuple):
    """A command with what it is about; 0 where it is about nothing."""

    command: PublishingCommand
    number: int = 0
    weight_id: int = 0


def give(exchange: Exchange, command: PublishingCommand, number: int = 0, weight_id: int = 0) -> None:
    """Rank 0 gives the other ranks their next command."""
    exchange.from_first((command, number, weight_id))


def take(exchange: Exchange) -> Order:
    """By another rank. Raises LaminarError when rank 0 says nothing for too long."""
    command, number, weight_id = exchange.from_first((0, 0, 0))
    return Order(PublishingCommand(command), number, weight_id)
