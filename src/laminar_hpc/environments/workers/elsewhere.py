"""Our worker under another interpreter, in whose environment we are not installed: run by its path, it makes
this package, and nothing that stands beside it, one that can be imported. See interpreter.py."""

import importlib.util
import sys
from pathlib import Path


def _import_us() -> None:
    folder = Path(__file__).resolve().parents[2]
    spec = importlib.util.spec_from_file_location(
        folder.name, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None and spec.loader is not None
    sys.modules[folder.name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)


if __name__ == "__main__":
    _import_us()
    from laminar_hpc.environments.workers.process import main

    main()
