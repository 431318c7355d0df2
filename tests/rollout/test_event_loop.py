"""A replica's event loop with more that is ready than a turn takes."""

import contextlib
import selectors
import socket

from laminar_hpc.rollout.event_loop import FewAtOnce


def test_a_turn_takes_a_few_of_what_is_ready_and_all_of_it_by_turns() -> None:
    """Nothing is left for good while all else stays ready."""
    with contextlib.ExitStack() as stack:
        pairs = [socket.socketpair() for _ in range(100)]
        for end in (end for pair in pairs for end in pair):
            stack.callback(end.close)
        selector = stack.enter_context(FewAtOnce())
        for here, there in pairs:
            there.send(b"x")
            selector.register(here, selectors.EVENT_READ)
        all_ready = {here.fileno() for here, _ in pairs}
        turns = [[key.fd for key, _ in selector.select(0)] for _ in range(4)]
    assert [len(set(turn)) for turn in turns] == [32, 32, 32, 32]
    assert {fd for turn in turns for fd in turn} == all_ready
