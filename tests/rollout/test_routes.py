"""Which routes a response so far has, asks for and keeps (rollout/routes.py), and those of requests that
SGLang retracts (engine/sglang/plugin/routes.py)."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from laminar_hpc.config.routing import RouteShape
from laminar_hpc.engine.interface import Generation
from laminar_hpc.engine.sglang.plugin import routes as plugin
from laminar_hpc.line.messages.data import Partial, PromptGroup, Sample, VersionSpan
from laminar_hpc.line.messages.rollouts import Grant
from laminar_hpc.rollout.in_flight import TrajectoryInFlight, granted
from laminar_hpc.rollout.routes import as_rows, whole_routes
from laminar_hpc.store.payload.layout import DamagedResponse

SHAPE = RouteShape((0, 2), 2, 100)  # of three layers the middle one has no router
PROMPT = [5, 6, 7]


def routes_of(engine: int, start: int, end: int) -> bytes:
    """Places [start, end), by an engine: 90 and its number, then the place."""
    rows = [[[90 + engine, place], [90 + engine, place]] for place in range(start, end)]
    return np.array(rows, np.uint8).tobytes()


def drawn(engine: int, sequence: int, start: int, count: int) -> Generation:
    """`count` tokens behind a sequence of so many, with the routes from `start` on."""
    tokens, logprobs = np.arange(count, dtype=np.int32), np.zeros(count, np.float32)
    came = routes_of(engine, start, sequence + count - 1)
    return Generation(tokens, logprobs, "stop", [VersionSpan(1, 0, count)], routes=came)


@pytest.fixture
def trajectory() -> TrajectoryInFlight:
    group = PromptGroup(1, PROMPT, "", {}, [])
    return TrajectoryInFlight(7, 0, group, 1, 0, 1.0, 100, route_shape=SHAPE)


def engines_of(trajectory: TrajectoryInFlight) -> list[int]:
    """Whose each row is; all rows are at their places."""
    rows = whole_routes(trajectory.partial, len(PROMPT), SHAPE)
    assert rows.shape == (len(PROMPT) + trajectory.partial.count - 1, 2, 2)
    assert (rows[:, :, 1] == np.arange(len(rows))[:, None]).all()
    return (rows[:, 0, 0] - 90).tolist()


def test_each_draw_keeps_its_routes(trajectory: TrajectoryInFlight) -> None:
    """Engine 1 draws two tokens, the environment gives two, engine 2 prefills all of it and draws three: of
    what engine 2 has computed the rows count from the last token that engine 1 drew."""
    assert trajectory.asks_routes_from() == 0
    trajectory.add(drawn(1, 3, 0, 2))
    trajectory.give([1, 1])
    assert trajectory.asks_routes_from() == 4
    trajectory.add(drawn(2, 7, 4, 3))
    assert engines_of(trajectory) == [1, 1, 1, 1, 2, 2, 2, 2, 2]
    trajectory.add(Generation(np.zeros(0, np.int32), np.zeros(0, np.float32), "abort", []))
    assert trajectory.asks_routes_from() == 9
    trajectory.cut(6)
    assert engines_of(trajectory) == [1, 1, 1, 1, 2, 2, 2, 2]
    trajectory.begin_again()
    assert trajectory.asks_routes_from() == 0


def test_a_branch_begins_with_rows_of_its_own(trajectory: TrajectoryInFlight) -> None:
    """Its first token is token 0 of the sequence that the engine sees. What stands at the end of the earlier
    branch, which the engine never saw, gets the first experts: nothing trained depends on it."""
    trajectory.add(drawn(1, 3, 0, 2))
    trajectory.give([8])
    trajectory.branch()
    trajectory.give([9, 9])
    assert trajectory.asks_routes_from() == 0
    generation = drawn(2, 2, 0, 4)
    trajectory.add(generation)
    rows = whole_routes(trajectory.partial, len(PROMPT), SHAPE)
    assert len(rows) == 3 + 3 + 2 + 4 - 1
    assert rows[4:6].tolist() == [[[0, 1], [0, 1]]] * 2
    assert rows[6:].tobytes() == generation.routes


@pytest.mark.parametrize(
    ("routes", "says"),
    [
        (None, "gave the routes of 0 tokens, and 4 are due"),
        (routes_of(1, 0, 3), "gave the routes of 3 tokens, and 4 are due"),
        (routes_of(1, 0, 4)[:-1], "gave the routes of 3.75 tokens, and 4 are due"),
        (routes_of(10, 0, 4), "its numbers are not all below the model's 100 experts"),
        (routes_of(1, 4, 7) + bytes(4), "token 3 has the same expert twice in layer 0"),
    ],
)
def test_routes_that_are_not_due_are_refused(
    trajectory: TrajectoryInFlight, routes: bytes | None, says: str
) -> None:
    """The trajectory is lost with one line; its response so far stays as it was."""
    columns = np.zeros(2, np.int32), np.zeros(2, np.float32)
    trajectory.asks_routes_from()
    with pytest.raises(DamagedResponse, match=says):
        trajectory.add(Generation(*columns, "stop", [VersionSpan(1, 0, 2)], routes=routes))
    assert trajectory.partial.count == 0


def test_what_comes_without_routes_begins_again() -> None:
    """A rescued response goes on where each drawn token has its row, and else from its prompt; of tokens that
    only the environment gave no row is needed. An evaluation keeps no routes."""
    span = [VersionSpan(1, 0, 2)]
    whole = Partial(bytes(8), bytes(8), span, moves=1, routes=routes_of(1, 0, 4))
    short = Partial(bytes(12), bytes(12), [VersionSpan(1, 0, 3)], moves=1, routes=routes_of(1, 0, 4))
    opening = Partial(bytes(8), bytes(8), [], home="h")
    group = PromptGroup(1, PROMPT, "", {}, [Sample(i, 0) for i in range(3)])
    grant = Grant(1, 1, 0, [group], 1.0, 100, parts={0: whole, 1: short, 2: opening})
    assert [t.partial for t in granted(grant, SHAPE)] == [whole, Partial(moves=1), opening]
    assert [t.partial for t in granted(grant)] == [whole, short, opening]
    grant.evaluation = "held out"
    assert granted(grant, SHAPE)[0].asks_routes_from() is None


class Slots:
    """Routes by slot as SGLang's capturer keeps them; slot n is token n's."""

    def __init__(self) -> None:
        self.rows = torch.zeros(32, 3, 2, dtype=torch.int32)

    def get_topk(self, _: object, tokens: int, __: object, start: int) -> torch.Tensor:
        return self.rows[start : tokens - 1].clone()


def test_a_retracted_request_keeps_the_routes_of_its_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice retracted and prefilled again elsewhere: each token's row is of the pass that drew the next one;
    layers without a router are left out."""
    slots = Slots()
    monkeypatch.setattr(plugin, "_capturer", lambda: slots)
    monkeypatch.setattr(plugin, "_shape", lambda _: SHAPE)
    req = SimpleNamespace(
        return_routed_experts=True,
        routed_experts_start_len=1,
        origin_input_ids=[0] * 3,
        output_ids=[0] * 2,
        kv=SimpleNamespace(req_pool_idx=0),
        routed_experts=None,
    )
    for life, tokens in ((1, 2), (2, 5)):
        slots.rows[:] = life
        req.output_ids = [0] * tokens
        plugin.keep_retracted(req=req, req_to_token_pool=None, remaining=1)
    slots.rows[:] = 3

    def original(_: object, req: SimpleNamespace) -> None:
        req.routed_experts = slots.get_topk(0, 3 + 7, None, 1)

    req.output_ids = [0] * 7
    plugin.collect(original, SimpleNamespace(model_config=None), req)
    assert req.routed_experts.dtype == torch.uint8 and req.routed_experts.shape == (8, 2, 2)
    assert req.routed_experts[:, 0, 0].tolist() == [1, 1, 1, 2, 2, 2, 3, 3]
    assert as_rows(req.routed_experts.numpy().tobytes(), SHAPE).shape == (8, 2, 2)


def test_numbers_that_are_no_experts_do_not_leave_the_engine() -> None:
    """-1, and what padding of a graph leaves."""
    rows = torch.zeros(4, 3, 2, dtype=torch.int32)
    assert plugin.narrowed(rows, SHAPE) is not None
    for wrong in (-1, 100):
        rows[2, 2, 1] = wrong
        assert plugin.narrowed(rows, SHAPE) is None
    rows[2] = 0
    rows[2, 1] = -1  # of the layer without a router
    assert plugin.narrowed(rows, SHAPE) is not None
