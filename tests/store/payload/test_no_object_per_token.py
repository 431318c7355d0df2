"""From the engine's reply to the optimizer no object is made per token."""

import sys
import threading
from pathlib import Path

import numpy as np
import torch

from laminar_hpc.controller.trajectories.partial_responses import PartialResponsePool
from laminar_hpc.engine.interface import Generation
from laminar_hpc.line.messages.data import Partial, PromptGroup, VersionSpan
from laminar_hpc.line.messages.rollouts import Increment, Unfinished
from laminar_hpc.line.messages.training import Batch, BatchGroup
from laminar_hpc.line.messages.wire import decode, encode
from laminar_hpc.rollout.in_flight import TrajectoryInFlight
from laminar_hpc.rollout.partial_response import columns, extended, objection
from laminar_hpc.store.payload.reader import read
from laminar_hpc.store.payload.whole import place_of
from laminar_hpc.store.payload.writer import PayloadWriter
from laminar_hpc.trainer.step.batch import plan_of
from laminar_hpc.trainer.step.microbatch import Example, Text, make_microbatch

TOKENS = 1 << 20


class Counted:
    """The most blocks of the interpreter's allocator at once, seen by a thread; arrays and long byte strings
    are not among them, each int or float is."""

    def __enter__(self) -> "Counted":
        self.first = self.most = sys.getallocatedblocks()
        self._over = threading.Event()
        self._interval = sys.getswitchinterval()
        sys.setswitchinterval(1e-4)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        sys.setswitchinterval(self._interval)

    def _run(self) -> None:
        while not self._over.wait(1e-4):
            self.most = max(self.most, sys.getallocatedblocks())

    @property
    def made(self) -> int:
        return self.most - self.first


def through_the_system(run_dir: Path, generation: Generation) -> torch.Tensor:
    """A response on its whole way; the behaviour log-probs as the objective gets them."""
    prompt = PromptGroup(0, [1, 2, 3], "", {}, [])
    told = columns(generation.tokens[:1000], generation.logprobs[:1000])
    pool = PartialResponsePool()
    increment = Increment(0, 0, 0, *told, [VersionSpan(5, 0, 1000)], 1.0)
    pool.add(decode(encode(increment)))
    so_far = extended(Partial(), generation)
    pool.put(0, 1, decode(encode(Unfinished(0, 1, so_far))).partial)
    work = TrajectoryInFlight(0, 0, prompt, 5, 0, 1.0, TOKENS, partial=so_far, finish_reason="stop")
    assert objection(work.partial, work.finish_reason, 5) is None
    response, writer = work.packed(), PayloadWriter(run_dir, "rollout0")
    record = work.finished(0, response)
    record.place = writer.append(response).result(30.0)
    writer.close()
    group = BatchGroup(0, columns(prompt.prompt_tokens, [])[0], [record])
    [planned] = plan_of(decode(encode(Batch(0, [group], 1, ""))).groups)
    [found] = read(run_dir, [place_of(planned.record)])
    example = Example(Text(planned.prompt, found), torch.ones(()).expand(found.trained))
    return make_microbatch([example], torch.device("cpu")).tokens.behaviour


def test_none_on_the_whole_way(tmp_path):
    """Increments, hand-overs, payload file, plan and micro-batch of a response of a million tokens."""
    logprobs = -np.arange(TOKENS, dtype=np.float32) / TOKENS
    generation = Generation(np.arange(TOKENS, dtype=np.int32), logprobs, "stop", [VersionSpan(5, 0, TOKENS)])
    through_the_system(tmp_path, generation)  # what is imported and cached once
    with Counted() as counted:
        behaviour = through_the_system(tmp_path, generation)
    assert torch.equal(behaviour, torch.from_numpy(logprobs)) and counted.made < TOKENS // 50
    with Counted() as counted:
        listed = generation.tokens.tolist()
    assert counted.made > TOKENS // 2 and len(listed) == TOKENS, "such objects are seen"
