"""A small controller around the real Hub and Store: it lets everybody in, answers pings, and writes down what
it is told in the transaction that acknowledges it."""

import threading
from pathlib import Path

from helpers.links.proxy import Proxy
from laminar_hpc.line.hub import Hub, UnreadableMessage
from laminar_hpc.line.messages.membership import Goodbye, Hello, Ping, Pong, Rejoin, Welcome
from laminar_hpc.line.messages.rollouts import Lost
from laminar_hpc.line.messages.training import NotYet
from laminar_hpc.store.store import Store


class Keeper:
    """One life over the store in `folder`, in a thread. Lost(n) from a worker is kept as n; `say` sends
    NotYet with n as its reason."""

    def __init__(self, folder: Path, life: int = 0, through_proxy: bool = False) -> None:
        self.hub = Hub(folder, f"life{life}", "127.0.0.1", 0, "apart")
        self.proxy = Proxy(self.hub.address.port) if through_proxy else None
        if self.proxy:
            self.hub.address.port = self.proxy.port
        self.store: Store | None = None
        self.folder, self.kept, self.members = folder, list[int](), set[str]()
        self.refused: list[str] = []
        self.turns, self.frozen, self.deaf, self.to_say = 0, False, False, list[str]()
        self._lock, self._ready = threading.Lock(), threading.Event()
        self._end = ""
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert self._ready.wait(10)

    def say(self, *numbers: int) -> None:
        with self._lock:
            self.to_say += [str(number) for number in numbers]

    def _run(self) -> None:
        self.store = Store(self.folder)
        self.hub.announce(self.store.store_id, self.store.received())
        self._ready.set()
        while self._end != "close":
            if self.frozen:
                threading.Event().wait(0.01)
                if self._end:
                    break
                continue
            new: list[int] = []
            outbox: list[tuple[str, Welcome | Pong | Rejoin | NotYet]] = []
            gone: list[str] = []
            for identity, message in self.hub.poll(0.02):
                self._hear(identity, message, new, outbox, gone)
            if self._end == "kill":  # what was heard and not committed is forgotten
                break
            self.store.note_received(self.hub.received())
            if new:
                self.store.put("kept", self.store.get("kept", 0) + len(new))
            self.store.commit()
            self.kept += new
            for identity in gone:
                self.hub.end(identity)
            self.hub.committed()
            with self._lock:
                if self.members:
                    said = [NotYet(0, text) for text in self.to_say]
                    outbox += [(identity, message) for message in said for identity in self.members]
                    self.to_say.clear()
            for identity, answer in outbox:
                self.hub.send(identity, answer)
            self.turns += 1
        if self._end == "kill":
            self.store.roll_back()
        self.store.close()
        self.hub.close()

    def _hear(self, identity, message, new, outbox, gone) -> None:
        if isinstance(message, UnreadableMessage):
            self.refused.append(message.reason)
        elif isinstance(message, Hello):
            self.members.add(identity)
            assert self.store is not None
            outbox.append((identity, Welcome(self.hub.address.run_id, "", self.store.store_id)))
        elif isinstance(message, Ping):
            outbox.append((identity, Pong() if identity in self.members else Rejoin()))
        elif isinstance(message, Goodbye):
            self.members.discard(identity)
            gone.append(identity)
        elif isinstance(message, Lost):
            new.append(message.trajectory_id)

    def take_for_dead(self) -> None:
        """Forgets all members, as one that was silent for too long."""
        for identity in list(self.members):
            self.members.discard(identity)
            self.hub.end(identity)

    def kill(self) -> list[int]:
        """Ends in the middle of a turn, without a word; returns what was committed."""
        self._finish("kill")
        return self.kept

    def close(self) -> list[int]:
        self._finish("close")
        return self.kept

    def _finish(self, how: str) -> None:
        self._end = how
        self._thread.join(10)
        if self.proxy:
            self.proxy.close()
