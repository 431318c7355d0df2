"""What waits for a write when its channel closes."""

import threading
import time
from concurrent.futures import Future

from laminar_hpc.line.in_order import InOrder


def test_what_waits_for_a_write_that_has_just_ended_goes_out_before_the_line_closes():
    """Promise: a write is done a moment before its frame is put; `drain` waits for the frame."""
    put, failed, gate = list[bytes](), list[Exception](), threading.Event()
    order, write = InOrder(put.append, failed.append), Future[int]()
    write.add_done_callback(lambda _: gate.wait(20))  # between the end of the write and what follows from it
    order.add_after(write, lambda given: b"%d" % given)
    order.add(b"behind")
    writer = threading.Thread(target=write.set_result, args=(7,))
    writer.start()
    assert write.result(20) == 7
    threading.Timer(0.1, gate.set).start()
    order.drain(20)
    assert put == [b"7", b"behind"] and order.idle and not failed
    writer.join()


def test_nobody_waits_behind_a_write_that_has_failed():
    """Promise: nothing behind it goes out, its error is told, and `drain` ends with it."""
    put, failed = list[bytes](), list[Exception]()
    order, write = InOrder(put.append, failed.append), Future[int]()
    order.add_after(write, lambda given: b"%d" % given)
    order.add(b"behind")
    error, begun = OSError("no space left"), time.monotonic()
    threading.Timer(0.1, write.set_exception, (error,)).start()
    order.drain(20)
    assert time.monotonic() - begun < 10 and failed == [error] and not put and not order.idle
