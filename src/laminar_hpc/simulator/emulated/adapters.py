"""Which adapters an emulated engine serves, by their weight ids. Used by engine.py and decoding.py."""

from collections.abc import Iterable

from laminar_hpc.config.errors import LaminarError
from laminar_hpc.engine.interface import BASE, RequestFailed

# of a pull of full weights: rank 16 on all linear layers of 7B to 72B has 0.3 to 0.6 % of the bytes
PULL_SHARE = 0.005


class Adapters:
    """`engine` is its name, for errors. `loaded` is None where the engine serves full weights."""

    def __init__(self, engine: str, served: bool) -> None:
        self.engine = engine
        self.loaded: set[int] | None = set() if served else None

    def named(self, namespace: str) -> int | None:
        """The adapter of a request with this `namespace`; None where it is of no adapter. Raises
        RequestFailed where the id is not loaded."""
        if self.loaded is None or namespace == BASE:
            return None
        if not namespace.isdigit() or int(namespace) not in self.loaded:
            raise RequestFailed(absent(self.engine, namespace, self.loaded))
        return int(namespace)

    def add(self, weight_id: int) -> None:
        """Raises LaminarError where it is loaded already."""
        if self.loaded is None:
            raise LaminarError(f"{self.engine} was started without adapters; set model.lora.rank")
        if weight_id in self.loaded:
            raise LaminarError(f"{self.engine} has weight id {weight_id} loaded already")
        self.loaded.add(weight_id)

    def remove(self, weight_id: int, running: int) -> None:
        """Raises LaminarError while `running` requests of it run."""
        if running:
            raise LaminarError(
                f"{self.engine} keeps the adapter of weight id {weight_id}: {running} requests of it run"
            )
        if self.loaded is not None:
            self.loaded.discard(weight_id)


def absent(engine: str, namespace: str, loaded: Iterable[int]) -> str:
    """What is said of a request whose adapter the engine does not have."""
    known = ", ".join(map(str, sorted(loaded))) or "none"
    return f"{engine} has no adapter of weight id {namespace!r}; loaded: {known}"
