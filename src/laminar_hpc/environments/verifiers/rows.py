"""The tasks of a taskset as rows of a JSONL file: {"prompt", "task"}. A run writes its own once, so that it
goes on with the same ones; for other files, as evaluation.files wants them:

    python -m laminar_hpc.environments.verifiers.rows PYTHON TASKSET_OR_JSON FILE
"""

import asyncio
import hashlib
import json
import sys
from pathlib import Path

from laminar_hpc.config.errors import LaminarError
from laminar_hpc.config.schema import EnvironmentConfig
from laminar_hpc.environments.verifiers.process import block, loaded, name
from laminar_hpc.environments.workers.fork_server import WorkerLost
from laminar_hpc.environments.workers.protocol import Call


def run_rows(config: EnvironmentConfig, run_dir: str) -> str:
    """The file of a run, written if it is not there. Raises LaminarError."""
    said = json.dumps(block(config), sort_keys=True).encode()
    file = Path(run_dir).absolute() / f"verifiers-{hashlib.sha256(said).hexdigest()[:12]}.jsonl"
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        asyncio.run(write(config, file))
    return str(file)


async def write(config: EnvironmentConfig, file: Path) -> int:
    """How many rows there are. Raises LaminarError."""
    async with loaded(config) as worker:
        try:
            answer = await worker.ask(Call(1, method="rows", arguments=json.dumps({"file": str(file)})))
        except WorkerLost:
            raise LaminarError(f"{name(config)}: its process ended while it read tasks") from None
    if answer.error:
        raise LaminarError(f"{name(config)}: {answer.error}")
    return int(answer.text or 0)


def main(words: list[str]) -> int:
    try:
        python, named, file = words
        of_json = named.startswith("{")
        config = EnvironmentConfig(verifiers=json.loads(named) if of_json else named, python=python)
        print(f"{file}: {asyncio.run(write(config, Path(file).absolute())):,} rows")
    except (ValueError, KeyError, TypeError):
        print(f"usage: {__doc__.split('    ')[1].strip()}", file=sys.stderr)
        return 2
    except LaminarError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
