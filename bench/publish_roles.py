"""Who stands around the trainer in bench/publish.py: relays in processes of their own, and a script in place
of the controller."""

import multiprocessing
import os
import threading
from collections import deque
from pathlib import Path

RELAYS = 2


class Line:
    """A role's line to the controller, which is `Script` here; for a relay over a pipe."""

    def __init__(self, send: object, pipe: object = None) -> None:
        self.send, self._pipe, self._inbox, self._arrived = send, pipe, deque(), threading.Condition()

    def deliver(self, message: object) -> None:
        with self._arrived:
            self._inbox.append(message)
            self._arrived.notify_all()

    def wait(self, *wanted: type, timeout: float) -> object | None:
        if self._pipe is not None:
            return relay_wait(self._pipe, timeout)
        with self._arrived:
            found = self._arrived.wait_for(
                lambda: next((x for x in self._inbox if isinstance(x, wanted)), None), timeout
            )
            if found is not None:
                self._inbox.remove(found)
            return found

    def pending(self, *wanted: type) -> bool:
        with self._arrived:
            return any(isinstance(item, wanted) for item in self._inbox)

    def interrupt(self, error: Exception) -> None:
        raise error

    sessions, detached = 0, False

    def request(
        self, message: object, *answers: type, timeout: float, what: str, fits: object, meanwhile: object
    ) -> object:
        self.send(message)
        return self.wait(*answers, timeout=timeout)


def relay_wait(pipe: object, timeout: float) -> object | None:
    from laminar_hpc.line.endings import StopReceived

    message = pipe.recv() if pipe.poll(timeout) else None
    if message == "stop":
        raise StopReceived("done")
    return message


def context(config: object, role: str, index: int, line: Line, folder: Path) -> object:
    from laminar_hpc.line.context import RoleContext
    from laminar_hpc.line.messages.membership import Welcome
    from laminar_hpc.machine.observability.trace import Trace

    welcome = Welcome(f"bench-{folder.name}-{role}{index}")
    return RoleContext(config, role, index, "here", folder, line, welcome, Trace(folder, role, index))


def relay_main(config: object, index: int, pipe: object, folder: Path) -> None:
    from laminar_hpc.machine.processes import die_with_parent
    from laminar_hpc.weights.relay import run

    die_with_parent()
    run.run(context(config, "relay", index, Line(pipe.send, pipe), folder))
    os._exit(0)  # a thread that waits in gloo must not wake while the interpreter ends


class Script:
    """The controller: links the trainer with the chain of relays, numbers the weight ids, keeps what it is
    told."""

    def __init__(self, config: object, folder: Path) -> None:
        self.trainer, self.heard, self.changed = Line(self.told), [], threading.Condition()
        self.pipes, self.processes, self.epoch, self.next_id, self.relays = [], [], 0, 0, RELAYS
        spawn = multiprocessing.get_context("spawn")
        for index in range(RELAYS):
            ours, theirs = spawn.Pipe()
            self.processes.append(spawn.Process(target=relay_main, args=(config, index, theirs, folder)))
            self.processes[-1].start()
            self.pipes.append(ours)
            threading.Thread(target=self.of_relay, args=(ours,), daemon=True).start()

    def of_relay(self, pipe: object) -> None:
        while True:
            try:
                self.told(pipe.recv())
            except EOFError:
                return

    def note(self, message: object) -> None:
        with self.changed:
            self.heard.append(message)
            self.changed.notify_all()

    def link(self) -> None:
        """Links trainer and relays anew, each pair in an epoch of its own."""
        from laminar_hpc.line.messages.chain import EpochProposed

        self.receivers = {}
        for place in range(self.relays):
            self.epoch += 1
            self.receivers[self.epoch] = place
            proposed = EpochProposed(self.epoch, list(range(place, self.relays)))
            if place:
                self.pipes[place - 1].send(proposed)
            else:
                self.trainer.deliver(proposed)

    def told(self, message: object) -> None:
        from laminar_hpc.line.messages.chain import JoinEpoch, StoreOpened
        from laminar_hpc.line.messages.publication import NewWeightId, WeightId

        if isinstance(message, StoreOpened):
            self.pipes[self.receivers[message.epoch]].send(
                JoinEpoch(message.epoch, message.host, message.port, "its neighbour")
            )
        elif isinstance(message, NewWeightId):
            self.trainer.deliver(WeightId(self.next_id, message.step, self.relays, message.request))
            self.next_id += 1
        self.note(message)

    def wait_for(self, kind: type, count: int) -> list:
        def found() -> list:
            return [message for message in self.heard if isinstance(message, kind)]

        with self.changed:
            if not self.changed.wait_for(lambda: len(found()) >= count, 120):
                raise SystemExit(f"no {kind.__name__} after 120 s; heard last: {self.heard[-3:]}")
            return found()

    def stop(self) -> None:
        for pipe in self.pipes:
            pipe.send("stop")
        for process in self.processes:
            process.join(30)
