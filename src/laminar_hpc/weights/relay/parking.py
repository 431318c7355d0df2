"""KV caches in a relay's host memory, of trajectories that wait for a replica (line/messages/parking.py).

    Park   -> an address for the source's engine   -> Reserved, or MoveFailed where there is no memory
    Keep   -> what has come of it                  -> Parked
    HandOn -> in a thread: to the taker's engine   -> HandedOn; it is forgotten here
    Unpark -> it is forgotten

A KV cache is kept once at most, and goes to one taker at most. The relay's main thread calls, and waits for
nothing. What a relay keeps is lost with it: then the trajectory is prefilled again.
"""

import logging
import pkgutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from laminar_hpc.config.errors import LaminarError
from laminar_hpc.config.schema import RunConfig
from laminar_hpc.line.address import own_address
from laminar_hpc.line.messages.data import Message
from laminar_hpc.line.messages.moves import MoveFailed, Reserved
from laminar_hpc.line.messages.parking import HandedOn, HandOn, Keep, Park, Parked, Unpark
from laminar_hpc.machine.host_memory import usable_memory

log = logging.getLogger(__name__)
HAND_ON_SECONDS = 30.0  # of one wait for the taker's engine
_THREADS = 4  # KV caches that are handed on at once
_SHARE = 0.25  # of the machine's free memory, where relay.parked_gigabytes is not set


class KvPark(Protocol):
    """Keeps KV caches in the form in which engines of one kind send them. Thread-safe."""

    def open(self, move_id: str) -> str:
        """The address to which the source's engine may send. Raises LaminarError without memory."""

    def kept(self, move_id: str) -> tuple[int, int]:
        """(tokens, bytes) of what has come whole; what has not is forgotten."""

    def hand_on(self, move_id: str, address: str, seconds: float) -> tuple[int, int]:
        """Sends it to the engine at `address`, which has checked it when this returns (tokens, bytes); it is
        forgotten in any case. Raises LaminarError."""

    def drop(self, move_id: str) -> None:
        """Forgets it; an unknown one is no error."""

    def close(self) -> None:
        """Forgets all."""


# By name: they stand on the engines' ways of sending, which know of weights.
_PARKS = {
    "sglang": "laminar_hpc.engine.kv.parked:HostPark",
    "emulated": "laminar_hpc.simulator.emulated.parked:EmulatedPark",
}


def parked_bytes_max(config: RunConfig) -> int:
    """Host memory for KV caches that wait, as the relay starts to keep some."""
    given = config.relay.parked_gigabytes
    return int(_SHARE * usable_memory()) if given is None else int(given * 1e9)


class ParkingLot:
    """A relay's. `send` is to the controller."""

    def __init__(self, config: RunConfig, send: Callable[[Message], None]) -> None:
        self._config = config
        self._send = send
        self._park: KvPark | None = None
        self._threads = ThreadPoolExecutor(_THREADS, "kv-hand-on")

    def _kept_here(self) -> KvPark:
        """Made when the first KV cache comes: most relays never keep one."""
        if self._park is None:
            config = self._config
            host, limit = own_address(config.cluster.host), parked_bytes_max(config)
            made = pkgutil.resolve_name(_PARKS[config.rollout.engine])
            self._park = made(host, limit, config.rollout.tensor_parallel)
            log.info("up to %d bytes of KV caches are kept for trajectories that wait", limit)
        return self._park

    def arrived(self, message: Message) -> None:
        """Of the controller."""
        if isinstance(message, Park):
            self._open(message.move_id)
        elif isinstance(message, Keep):
            tokens, size = self._kept_here().kept(message.move_id)
            self._send(Parked(message.move_id, tokens, size))
        elif isinstance(message, HandOn):
            self._threads.submit(self._hand_on, message)
        elif isinstance(message, Unpark) and self._park is not None:
            self._park.drop(message.move_id)

    def _open(self, move_id: str) -> None:
        try:
            self._send(Reserved(move_id, self._kept_here().open(move_id)))
        except LaminarError as error:
            self._send(MoveFailed(move_id, str(error)))

    def _hand_on(self, order: HandOn) -> None:
        tokens = size = 0
        reason = ""
        try:
            tokens, size = self._kept_here().hand_on(order.move_id, order.address, HAND_ON_SECONDS)
        except Exception as error:  # of a library too: the taker must not wait for it
            reason = str(error) or type(error).__name__
            log.warning("KV of %s is not handed on: %s", order.move_id, reason)
        self._send(HandedOn(order.move_id, tokens, size, reason))

    def forget(self) -> None:
        """Another controller has come, or the same one had taken this relay for dead: none knows of what is
        kept here."""
        if self._park is not None:
            self._park.close()
        self._park = None

    def close(self) -> None:
        self.forget()
        self._threads.shutdown(wait=False, cancel_futures=True)
