"""Stands in for the package verifiers 0.3.1 where tests must be quick: what bridge.py uses of v0. Copied into
the folder of a test as `verifiers`."""

import importlib


class OpenAIChatCompletionsClient:
    """As verifiers has it: OpenAI's client, wrapped."""

    def __init__(self, client: object) -> None:
        self.client = client


def load_environment(name: str, **given: object) -> object:
    return importlib.import_module(name).load_environment(**given)
