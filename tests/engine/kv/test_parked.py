"""KV caches in a relay's memory come in over the wire and go out as they came: bit by bit, within a limit, to
one taker, and from nobody who has no address."""

import time

import msgspec
import pytest
import zmq

from helpers.links.pools import make, same, slots_of
from laminar_hpc.engine.kv.errors import KvRefused
from laminar_hpc.engine.kv.frames import PartHeader, encode_header
from laminar_hpc.engine.kv.inbox import Expected, KvInbox
from laminar_hpc.engine.kv.parked import HostPark
from laminar_hpc.engine.kv.pool import Pool, gather
from laminar_hpc.engine.kv.transfer import (
    TCP_CHUNK_BYTES,
    chunk_bytes,
    decode_address,
    of_all_ranks,
    of_rank,
    send_part,
)

SHAPE = {"layers": 4, "heads": 4, "head_dim": 64, "pages": 700}
TOKENS = list(range(1000, 1600))
SLOTS = slots_of(600, pages=700, seed=3)


def source(seed: int = 1) -> Pool:
    return make(**SHAPE, seed=seed)


def park(limit: float = 1e9, ranks: int = 1) -> HostPark:
    return HostPark("127.0.0.1", int(limit), ranks)


def send(address: str, pool: Pool, first: int = 0, end: int = 600, last: bool = True) -> None:
    """As a source's engine on the relay's own machine does."""
    header = PartHeader.of(
        "model", 3, pool.shape, TOKENS[first:end], chunk_bytes(address, "here"), first, last
    )
    send_part(address, header, pool, SLOTS[first:end], machine="here", folder="/dev/shm", seconds=10.0)


@pytest.fixture
def kept():
    made = park()
    yield made
    made.close()


def test_what_was_parked_is_taken_up_bit_by_bit():
    """Of two ranks, in two parts of which the second overlaps the first, as a source sends them."""
    lot = park(ranks=2)
    address, pools, targets = lot.open("5-0-1"), [source(1), source(2)], [source(3), source(4)]
    for rank, pool in enumerate(pools):
        send(of_rank(address, rank, 2), pool, 0, 320, last=False)
        send(of_rank(address, rank, 2), pool, 300, 600)
    theirs = slots_of(600, pages=700, seed=9)
    inboxes = [KvInbox(Expected("model", 3, pool, theirs), "127.0.0.1", "here") for pool in targets]
    tokens, size = lot.hand_on("5-0-1", of_all_ranks([inbox.address for inbox in inboxes]), 10.0)
    assert tokens == 600 and size > 2 * 600 * 2 * 4 * 4 * 64 * 2
    for inbox, pool, target in zip(inboxes, pools, targets, strict=True):
        assert inbox.complete and inbox.tokens == TOKENS and same(pool, SLOTS, target, theirs)
        inbox.close()
    with pytest.raises(KvRefused, match="is not kept here"):
        lot.hand_on("5-0-1", of_all_ranks([inbox.address for inbox in inboxes]), 1.0)
    assert lot._held == 0
    lot.close()


def test_only_what_has_come_whole_is_kept(kept):
    """The last part is missing: nothing of it is of use, and its memory is given back."""
    send(of_rank(kept.open("5-0-1"), 0, 1), source(), 0, 320, last=False)
    assert kept._held > 0
    assert kept.kept("5-0-1") == (0, 0) and kept._held == 0
    assert kept.kept("6-0-1") == (0, 0)


def test_memory_is_bounded():
    """What does not fit is refused when it is announced, before its bytes come; room that is given back is
    used again."""
    lot = park(limit=1.5 * 600 * 2 * 4 * 4 * 64 * 2)
    send(of_rank(lot.open("5-0-1"), 0, 1), source())
    with pytest.raises(KvRefused, match=r"KV cannot be parked: \d+ bytes are kept, \d+ may be"):
        send(of_rank(lot.open("6-0-2"), 0, 1), source())
    assert lot.kept("6-0-2") == (0, 0) and lot.kept("5-0-1")[0] == 600
    lot.drop("5-0-1")
    send(of_rank(lot.open("7-0-3"), 0, 1), source())
    assert lot.kept("7-0-3")[0] == 600
    lot.close()
    full = park(limit=0)
    with pytest.raises(KvRefused, match=r"relay\.parked_gigabytes"):
        full.open("5-0-1")
    full.close()


def talk(address: str, *messages: list[bytes], patience: float = 5.0) -> list[list[bytes]]:
    """Says these to the park as the address allows; what it answers, one for each but rows that want none."""
    place, answers = decode_address(address), []
    with zmq.Context() as context:
        dealer = context.socket(zmq.DEALER)
        dealer.linger = 0
        dealer.curve_serverkey = place.server_public.encode()
        dealer.curve_publickey = place.client_public.encode()
        dealer.curve_secretkey = place.client_secret.encode()
        dealer.connect(f"tcp://{place.host}:{place.port}")
        for message in messages:
            dealer.send_multipart(message)
            if dealer.poll(int(1000 * patience)):
                answers.append(dealer.recv_multipart())
        dealer.close()
    return answers


@pytest.mark.parametrize("byte", [0, 5, 9, 20, 64, 5000])
def test_a_damaged_chunk_is_refused(kept, byte):
    """In any byte that says something: the cache is of no use from then on."""
    pool = source()
    header = PartHeader.of("model", 3, pool.shape, TOKENS[:32], TCP_CHUNK_BYTES)
    record = bytearray(gather(pool, SLOTS[:32], TCP_CHUNK_BYTES, 1).numpy().tobytes())
    record = record[: 64 + int.from_bytes(record[8:16], "little")]
    address = of_rank(kept.open("5-0-1"), 0, 1)
    record[byte] ^= 1
    answers = talk(address, [b"part", encode_header(header)], [b"rows", bytes(record)])
    assert answers[0] == [b"go"] and answers[1][0] == b"no"
    assert kept.kept("5-0-1") == (0, 0)


def test_nobody_gets_in_without_an_address(kept):
    """A stranger's keys, and those of a move that is over, come to no answer; nonsense to one line."""
    address = of_rank(kept.open("5-0-1"), 0, 1)
    place = msgspec.json.decode(address)
    public, secret = (key.decode() for key in zmq.curve_keypair())
    strange = msgspec.json.encode(place | {"client_public": public, "client_secret": secret}).decode()
    assert talk(strange, [b"part", b"x"], patience=0.5) == []
    assert talk(address, [b"part", b"nonsense"])[0][0] == b"no"
    assert talk(address, [b"what"])[0][0] == b"no"
    kept.drop("5-0-1")
    assert talk(address, [b"part", b"x"], patience=0.5) == []


def test_a_taker_that_is_gone_costs_its_own_wait_only(kept):
    """The cache is given up then, and others are handed on meanwhile."""
    address = kept.open("5-0-1")
    send(of_rank(address, 0, 1), source())
    gone = KvInbox(Expected("model", 3, source(3), SLOTS), "127.0.0.1", "here")
    gone.close()
    assert gone.ended(5)
    begun = time.monotonic()
    with pytest.raises(KvRefused, match=r"said nothing for 0\.5 s"):
        kept.hand_on("5-0-1", of_all_ranks([gone.address]), 0.5)
    assert time.monotonic() - begun < 5 and kept._held == 0
