"""What runs under environment.python: verifiers' own environment server and its client, or an environment of
v0. Imports the standard library and verifiers only; process.py says how it is started.

It is a worker as workers/protocol.py has them, with frames of JSON on the socket that its last argument
names: the WorkerSetup, answered by Ready; then Calls, each answered by a CallResult.

    method    row         arguments                  the CallResult has
    run       the task    base_url, api_key, model   reward, parts: one episode of the session
    rows                  file                       text: how many tasks are in that JSONL file now
    ""                                               the session's episode is not wanted any more

The end of the socket ends all.
"""

import asyncio
import contextlib
import importlib
import importlib.metadata
import importlib.util
import json
import math
import multiprocessing
import os
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

_LENGTH = 4  # bytes in front of a frame, which say how long it is
_MAX_ERROR = 400  # characters
_MAX_REWARD = 1e6
_START_SECONDS = 60.0
_END_SECONDS = 2.0
V1 = ("0.4.",)  # versions that these lines were written for
V0 = ("0.1.14", "0.3.")


Graded = tuple[float, dict[str, Any]]  # the reward, and what else is known by name


class Unusable(Exception):
    """One line for the user."""


# ---- v1 ----------------------------------------------------------------------------------------------------


class EnvironmentOfV1:
    """A taskset and its agents, behind verifiers' own server on a socket in a folder of 0700."""

    def __init__(self, block: dict, max_turns: int) -> None:
        from verifiers.v1.configs.select import SelectConfig
        from verifiers.v1.utils.loaders import load_environment, resolve_env_config

        rest = dict(block)
        self._select = SelectConfig.model_validate(rest.pop("select", None) or {})
        self._config = resolve_env_config(_with_defaults(rest, max_turns))
        load_environment(self._config)  # what cannot work is said here, and not by a server that has died
        self._folder = tempfile.mkdtemp(prefix="laminar-verifiers-")

    def rows(self) -> Iterator[tuple[str, dict]]:
        from verifiers.v1.utils.loaders import load_taskset

        tasks = load_taskset(self._config.taskset).select(self._select)
        if not tasks.bounded:
            raise Unusable("its tasks never end: say how many, e.g. environment.verifiers.select.limit=1000")
        for task in tasks:
            yield task.data.prompt_text, task.data.model_dump(mode="json")

    async def start(self) -> None:
        from verifiers.v1.serve import EnvClient, env_config_data, serve_env

        address, context = f"ipc://{self._folder}/server", multiprocessing.get_context("spawn")
        self._alive, theirs = context.Pipe()
        given = {"max_workers": os.cpu_count(), "address": address, "death_pipe": theirs}
        given["config_data"] = env_config_data(self._config)
        self._process = context.Process(target=serve_env, kwargs=given)
        self._process.start()
        theirs.close()
        self._client = EnvClient(address)
        await self._client.wait_for_server_startup(_START_SECONDS, 0.1)

    def lives(self) -> bool:
        return self._process.is_alive()

    async def run(self, task: dict, base_url: str, api_key: str, model: str) -> Graded:
        from verifiers.v1.configs.client import EvalClientConfig
        from verifiers.v1.types import SamplingConfig

        given = {"base_url": base_url, "api_key_var": "LAMINAR_HAS_NONE", "headers": {"x-api-key": api_key}}
        client = EvalClientConfig(**given)
        episode = await self._client.run(client, model, SamplingConfig(), task)
        played = [t for t in episode.traces if t.agent.trainable and _is(t.agent.config.client, base_url)]
        if not episode.ok:
            errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
            raise Unusable(f"{errors[-1].type}: {errors[-1].message}" if errors else "the episode failed")
        if len(played) != 1:
            raise Unusable(f"an episode trains {len(played)} agents; give all but one another client")
        trace = played[0]
        parts = {name: reward.score for name, reward in trace.rewards.items() if reward is not None}
        return trace.reward, parts | {name: v for name, v in trace.metrics.items() if v is not None}

    async def close(self) -> None:
        self._alive.close()  # the server ends itself by that
        await self._client.close()
        await asyncio.to_thread(self._process.join, _END_SECONDS)
        shutil.rmtree(self._folder, ignore_errors=True)


def _is(client: object, base_url: str) -> bool:
    return getattr(client, "base_url", base_url) == base_url


def _with_defaults(block: dict, max_turns: int) -> dict:
    """For each agent that does not say otherwise: the run's limit of turns; the chat loop, on this machine,
    in place of a shell in somebody's cloud. Raises Unusable where model-written code would run here unasked.
    """
    from verifiers.v1.configs.agent import AgentConfig
    from verifiers.v1.utils.loaders import default_harness_id, env_config_type, harness_class

    ident = block["taskset"]["id"]
    for name, field in env_config_type(ident, block.get("id") or "").model_fields.items():
        if not isinstance(field.default, AgentConfig):
            continue
        given, said = dict(block.get(name) or {}), field.default.model_fields_set
        if "max_turns" not in given and "max_turns" not in said:
            given["max_turns"] = max_turns
        harness = given.get("harness") or {}
        if not harness and "harness" not in said and default_harness_id(ident) == "bash":
            given["harness"] = harness = {"id": "null"}
        if "runtime" not in given and "runtime" not in said:
            kind = harness.get("id") or (field.default.harness and field.default.harness.id)
            kind = kind or default_harness_id(ident)
            if harness_class(kind).EXECUTES_CODE:
                raise Unusable(
                    f"the harness {kind!r} runs what the model has written: say where, e.g. "
                    f"environment.verifiers.{name}.runtime.type=docker"
                )
            if shutil.which("uv") is None:
                raise Unusable(f"the chat loop needs uv: {sys.executable} -m pip install uv")
            given["runtime"] = {"type": "subprocess"}
        block = block | {name: given}
    return block


# ---- v0 ----------------------------------------------------------------------------------------------------


class EnvironmentOfV0:
    """An environment of v0, in this process; the fields of its taskset are load_environment's arguments."""

    def __init__(self, block: dict) -> None:
        import verifiers

        arguments = dict(block["taskset"])
        self._select = dict(block.get("select") or {})
        if others := [*(set(block) - {"taskset", "select"}), *(set(self._select) - {"limit"})]:
            raise Unusable(f"an environment of v0 has no {others[0]!r}: taskset and select.limit only")
        self._environment = verifiers.load_environment(arguments.pop("id"), **arguments)
        if getattr(self._environment, "requires_group_rollouts", False):
            raise Unusable("its rewards compare the rollouts of a group, which are graded one by one here")

    def rows(self) -> Iterator[tuple[str, dict]]:
        for row in self._environment.get_dataset(self._select.get("limit") or -1):
            prompt = row["prompt"]
            text = prompt if isinstance(prompt, str) else "\n\n".join(str(m["content"]) for m in prompt)
            yield text, row

    async def start(self) -> None:
        """It is here already."""

    def lives(self) -> bool:
        return True

    async def run(self, task: dict, base_url: str, api_key: str, model: str) -> Graded:
        import verifiers
        from openai import AsyncOpenAI

        async with AsyncOpenAI(base_url=base_url, api_key=api_key, timeout=None) as openai:
            client = verifiers.OpenAIChatCompletionsClient(openai)
            output = await self._environment.run_rollout(task, client, model, {})
        if output.get("error"):
            raise Unusable(str(output["error"]))
        return output["reward"], output.get("metrics") or {}

    async def close(self) -> None:
        """It ends with the process."""


Environment = EnvironmentOfV0 | EnvironmentOfV1


def made(block: dict, max_turns: int) -> Environment:
    """The environment that a block names. Raises Unusable."""
    try:
        version, ident = importlib.metadata.version("verifiers"), block["taskset"]["id"]
    except importlib.metadata.PackageNotFoundError:
        install = f"{sys.executable} -m pip install verifiers=={V1[0]}0 uv"
        raise Unusable(f"verifiers is not installed there: {install}") from None
    module = ident.rsplit("/", 1)[-1].split("@", 1)[0].replace("-", "_")
    old = importlib.util.find_spec(module) is not None and hasattr(
        importlib.import_module(module), "load_environment"
    )
    known, which = (V0, "an environment of v0") if old else (V1, "a taskset of v1")
    if not version.startswith(known):
        raise Unusable(f"{ident} is {which}, for verifiers {' or '.join(known)}; here is {version}")
    return EnvironmentOfV0(block) if old else EnvironmentOfV1(block, max_turns)


# ---- the socket --------------------------------------------------------------------------------------------


def _line(error: Exception) -> str:
    text = str(error) if isinstance(error, Unusable) else f"{type(error).__name__}: {error}"
    return " ".join(text.split())[:_MAX_ERROR]


class Bridge:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._episodes: dict[int, asyncio.Task[None]] = {}  # by session

    async def _heard(self) -> dict | None:
        try:
            length = int.from_bytes(await self._reader.readexactly(_LENGTH), "little")
            return json.loads(await self._reader.readexactly(length))
        except asyncio.IncompleteReadError:
            return None

    def _say(self, kind: str, **message: object) -> None:
        """JSON that any reader takes: of half a surrogate pair is left a question mark."""
        text = json.dumps({"type": kind, **message}, ensure_ascii=False, allow_nan=False)
        frame = text.encode(errors="replace")
        self._writer.write(len(frame).to_bytes(_LENGTH, "little") + frame)

    async def work(self) -> None:
        if (setup := await self._heard()) is None:
            return
        spec = setup["specs"][0]
        given = json.loads(spec["function"])
        try:
            environment = made(given["environment"], given["max_turns"])  # v0 wants the main thread
            if given["serve"]:
                await environment.start()
        except Exception as error:
            self._say("Ready", error=f"{spec['label']}: {_line(error)}")
            await self._writer.drain()
            return
        self._say("Ready", error="")
        try:
            await self._serve(environment, given["serve"])
        finally:
            for task in self._episodes.values():
                task.cancel()
            await asyncio.gather(*self._episodes.values(), return_exceptions=True)
            if given["serve"]:
                await environment.close()

    async def _serve(self, environment: Environment, serving: bool) -> None:
        hearing = asyncio.ensure_future(self._heard())
        while not serving or environment.lives():
            await asyncio.wait([hearing], timeout=1.0)
            if not hearing.done():
                continue
            if (call := hearing.result()) is None:
                return
            self._take(environment, call)
            hearing = asyncio.ensure_future(self._heard())

    def _take(self, environment: Environment, call: dict) -> None:
        session = call.get("session", 0)
        if not call.get("method"):
            if episode := self._episodes.get(session):
                episode.cancel()
            self._answer(call["id"])
            return
        self._episodes[session] = task = asyncio.ensure_future(self._play(environment, call))
        task.add_done_callback(lambda _: self._episodes.pop(session, None))

    def _answer(self, ident: int, **found: object) -> None:
        empty: dict = {"reward": None, "parts": {}, "t0": 0.0, "t1": time.time()}
        self._say("CallResult", id=ident, **empty | found)

    async def _play(self, environment: Environment, call: dict) -> None:
        ident, arguments, t0 = call["id"], json.loads(call["arguments"]), time.time()
        try:
            if call["method"] == "rows":
                rows = await asyncio.to_thread(_write, environment, arguments["file"])
                self._answer(ident, text=str(rows))
                return
            reward, parts = await environment.run(call["row"], **arguments)
            if not math.isfinite(reward := float(reward)):
                raise Unusable(f"it returned reward={reward}")
            if abs(reward) > _MAX_REWARD:
                raise Unusable(f"it returned reward={reward:g}, beyond ±{_MAX_REWARD:g}; scale it down")
            kept = {name: float(value) for name, value in parts.items() if isinstance(value, int | float)}
            kept = {name: value for name, value in kept.items() if math.isfinite(value)}
            self._answer(ident, reward=reward, parts=kept, t0=t0)
        except Exception as error:
            self._answer(ident, error=_line(error), fault="raised")


def _write(environment: Environment, file: str) -> int:
    """The tasks as rows; how many there are."""
    count = 0
    with open(f"{file}.new", "w", encoding="utf-8") as out:
        for prompt, task in environment.rows():
            out.write(json.dumps({"prompt": prompt or "-", "task": task}, default=str) + "\n")
            count += 1
        out.flush()
        os.fsync(out.fileno())
    os.replace(f"{file}.new", file)
    return count


async def main() -> None:
    ours = socket.socket(fileno=int(sys.argv[-1]))
    reader, writer = await asyncio.open_connection(sock=ours)
    with contextlib.suppress(ConnectionError):
        await Bridge(reader, writer).work()


if __name__ == "__main__":
    sys.path.insert(0, os.getcwd())  # as rewards and tools are found
    asyncio.run(main())
