"""Routes of trajectories that move or are rescued, through whole emulated runs: each token has the route of
the replica that drew the token behind it (rollout/routes.py)."""

import itertools
import json
import sqlite3
from pathlib import Path

import numpy as np
import pytest

from helpers.control.sabotage import Killer
from helpers.emulated.stand import PROMPT_TOKENS, Shuffler, Stand, assert_every_one_ended_once, small_config
from laminar_hpc.config.models import model_config
from laminar_hpc.config.routing import replayed_routes
from laminar_hpc.config.schema import RunConfig
from laminar_hpc.simulator.emulated import responses
from laminar_hpc.store.payload.reader import read_routes
from laminar_hpc.store.rows import stored_trajectories

EXPERTS = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 101,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 16,
}


def with_experts(folder: Path, **settings: object) -> RunConfig:
    """Three replicas with a model of experts, whose routes are kept."""
    config = small_config(folder, replicas=3, **settings)
    file = Path(config.model.path) / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | EXPERTS))
    config.algorithm.routing_replay = "true"
    return config


def writers(config: RunConfig) -> dict[int, list[int]]:
    """Of each trajectory of the run the replicas whose routes it has, in the order of its tokens; every token
    has a route that one of them gave for its place."""
    shape = replayed_routes(config, model_config(config.model.path))
    assert shape is not None
    database = sqlite3.connect(f"file:{config.run_dir}/store.sqlite?mode=ro", uri=True)
    ids = [i for (i,) in database.execute("SELECT id FROM trajectories")]
    records = [t for group in stored_trajectories(database, ids) for t in group.trajectories]
    database.close()
    wanted = [(t.trajectory_id, t.place, PROMPT_TOKENS + t.length - 1) for t in records if t.place]
    assert len(wanted) == len(ids)
    found, longest = dict[int, list[int]](), max(tokens for *_, tokens in wanted)
    due = [
        np.frombuffer(responses.routes(replica, 0, longest, shape), shape.dtype).reshape(
            longest, len(shape.layers), shape.per_token
        )
        for replica in range(config.rollout.replicas)
    ]
    for (i, _, tokens), rows in zip(wanted, read_routes(Path(config.run_dir), wanted, shape), strict=True):
        by = np.stack([(rows == of[:tokens]).all(axis=(1, 2)) for of in due])
        assert by.any(axis=0).all(), f"trajectory {i} has a route that no replica gave for its place"
        whose = by.argmax(axis=0)
        found[i] = [int(whose[0]), *(int(b) for a, b in itertools.pairwise(whose) if a != b)]
    return found


@pytest.mark.parametrize("repack", ["kv", "reprefill"])
def test_moved_trajectories_keep_the_routes_of_their_draws(tmp_path, repack):
    """With their KV cache or without: the rows of what a replica drew stay, and the next replica's follow."""
    config = with_experts(tmp_path, steps=6, repack=repack)
    stand = Stand(config, each_turn=Shuffler(5))
    stand.run(200)
    found, whose = assert_every_one_ended_once(config), writers(config)
    moved = {i for i, t in found.items() if t.moves}
    assert sum(len(whose[i]) > 1 for i in moved) > 10
    assert all(len(whose[i]) <= 1 + t.moves and whose[i][-1] == t.replica for i, t in found.items())


@pytest.mark.parametrize("keep_kv", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_newer_weights_come_into_running_trajectories(tmp_path, keep_kv):
    """refresh=interrupt: requests that are aborted give their routes, and what is prefilled again on newer
    weights keeps them; with its KV cache kept a trajectory goes on in one request."""
    config = with_experts(tmp_path, steps=5, refresh="interrupt", max_staleness=4, keep_kv=keep_kv)
    stand = Stand(config)
    stand.run(200)
    found, whose = assert_every_one_ended_once(config), writers(config)
    assert any(t.policies > 1 for t in found.values())
    assert all(whose[i] == [t.replica] for i, t in found.items())


def test_what_a_dead_engine_drew_begins_again(tmp_path):
    """Its tokens are known, its routes have died with it: nothing is trained under routes that it was not
    drawn with, and nothing is lost for good."""
    config = with_experts(tmp_path, steps=5)
    config.rollout.increment_tokens, config.relay.slots = 25, 3
    config.emulation.time_scale = 10.0
    stand = Stand(config)
    killer = stand.each_turn = Killer(stand.kill, 2, tokens=500, every=0.5, alone=False)
    stand.run(200)
    found, whose = assert_every_one_ended_once(config), writers(config)
    again = [i for i, t in found.items() if t.attempt > 0]
    assert killer.killed and again
    assert all(whose[i] == [found[i].replica] for i in again if not found[i].moves)
