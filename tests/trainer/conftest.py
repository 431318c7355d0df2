"""One process as a trainer world of its own for all tests of this folder, and two tiny models."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _world

from helpers.trainer import tiny
from helpers.trainer.ranks import Ranks


@pytest.fixture(scope="session")
def world() -> Iterator[None]:
    """A default group of one rank, once: Megatron-core keeps a world's groups, and so their threads."""
    from megatron.core import parallel_state

    threads = torch.get_num_threads()
    dist.init_process_group(
        "nccl" if torch.cuda.is_available() else "gloo", store=dist.HashStore(), rank=0, world_size=1
    )
    parallel_state.initialize_model_parallel()
    yield
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def groups_end_with_their_test() -> Iterator[None]:
    """A gloo group has three threads, of which one wakes 100 times a second, and each policy makes groups."""
    before = set(_world.pg_map)
    yield
    for group in [group for group in _world.pg_map if group not in before]:
        dist.destroy_process_group(group)


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Processes take seconds to start, so all files of this folder use the same."""
    pool = Ranks()
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def tied_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make_model(tmp_path_factory.mktemp("tied"))


@pytest.fixture(scope="session")
def untied_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make_model(tmp_path_factory.mktemp("untied"), seed=1, tie_word_embeddings=False)
