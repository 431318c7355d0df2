"""Bounds and choices of settings. They stand in the schema, beside the default, and one checker walks it.
Imports no torch.

    steps: int = number(60, at_least=1)
    lr: float = number(1e-4, above=0, at_most=1)
    most: int | str = number(2, at_least=0, word="auto")   # or auto, or auto:N with N within the bounds
    many: int | str = number(1, at_least=1, span=True)     # or MIN:MAX, both within the bounds
    loss: str = choice("clip", "gspo")            # the first is the default

Every number has to be finite, and every whole number below 2**31. A list of numbers has its bounds for each
entry.
"""

import dataclasses
import math
import types
import typing
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from laminar_hpc.config.errors import did_you_mean

T = TypeVar("T")
LARGEST_INTEGER = 2**31 - 1
LONGEST_WAIT = 1_000_000  # seconds, eleven days: poll() counts milliseconds in 32 bits
_NAME = "laminar"  # of our entry in a field's metadata


@dataclass(frozen=True)
class Bounds:
    """What a number may be; None = no bound on that side. `why`: what is wrong beyond them, if not plain.
    `word`: may stand in place of the number, or before it as `word:number`. `span`: MIN:MAX may."""

    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None
    why: str = ""
    word: str = ""
    span: bool = False

    def hold(self, value: float | str) -> bool:
        if isinstance(value, str):
            word, colon, most = value.partition(":")
            if self.span:
                both = word.isdecimal() and most.isdecimal() and int(word) <= int(most)
                return both and self.hold(int(word)) and self.hold(int(most))
            return word == self.word and (not colon or (most.isdecimal() and self.hold(int(most))))
        return (
            math.isfinite(value)
            and not (isinstance(value, int) and abs(value) > LARGEST_INTEGER)
            and (self.at_least is None or value >= self.at_least)
            and (self.above is None or value > self.above)
            and (self.at_most is None or value <= self.at_most)
            and (self.below is None or value < self.below)
        )

    def words_for(self, value: float | str) -> str:
        """The bound that a value breaks."""
        if isinstance(value, str):
            return f"a whole number, {self.words()}"
        if not math.isfinite(value):
            return "a finite number" + (f", {self.words()}" if self != Bounds() else "")
        too_large = isinstance(value, int) and value > (LARGEST_INTEGER if self.at_most is None else math.inf)
        if too_large or self == Bounds():
            return f"at most {LARGEST_INTEGER:,}"
        return self.words() + (f": {self.why}" if self.why else "")

    def words(self) -> str:
        """All of them."""
        parts = [
            f"{field.name.replace('_', ' ')} {bound:{',.0f' if float(bound).is_integer() else 'g'}}"
            for field in dataclasses.fields(self)
            if field.name not in ("why", "word", "span") and (bound := getattr(self, field.name)) is not None
        ]
        text = " and ".join(parts) or "finite"
        text += ", or MIN:MAX with MIN at most MAX" if self.span else ""
        return f"{text}, {self.word} or {self.word}:N" if self.word else text


@dataclass(frozen=True)
class Choices:
    """What a text may be. `or_path`: the dotted path of a function of the user's own, too."""

    names: Collection[str]
    or_path: bool = False

    def hold(self, value: object) -> bool:
        """Whether it is one of them; `true` and `false` of a switch may be written as a file has them."""
        if isinstance(value, bool):
            return shown(value) in self.names
        return value in self.names or (self.or_path and isinstance(value, str) and "." in value)

    def words(self) -> str:
        return ", ".join(self.names) + (", or MODULE.FUNCTION" if self.or_path else "")


def bounds(**limits: Any) -> dict[str, Bounds]:
    """Metadata of a dataclass field that holds numbers; `limits` are those of Bounds."""
    return {_NAME: Bounds(**limits)}


def number(default: T, **limits: Any) -> T:
    """A field that holds a number, or a list of numbers. Without limits it has to be finite only."""
    return dataclasses.field(default=default, metadata=bounds(**limits))


def seconds(default: float) -> float:
    """A field that holds a time limit or a period in seconds."""
    return number(default, above=0, at_most=LONGEST_WAIT)


def choice(*names: str, default: str = "") -> str:
    """A field that holds one of `names`; the default is the first of them where it is not named."""
    return dataclasses.field(default=default or names[0], metadata=choices(names))


def choice_or_path(names: Collection[str]) -> str:
    """A field that holds one of `names`, the first by default, or the dotted path of a function."""
    return dataclasses.field(default=next(iter(names)), metadata=choices(names, or_path=True))


def choices(names: Collection[str], or_path: bool = False) -> dict[str, Choices]:
    """Metadata of a field that holds some of `names`, a table that may grow before a value is checked."""
    return {_NAME: Choices(names, or_path)}


def allowed(field: "dataclasses.Field[Any]") -> Bounds | Choices | None:
    """What the schema says of a field's values; None where it says nothing."""
    return field.metadata.get(_NAME)


def plain_type(field: "dataclasses.Field[Any]") -> tuple[Any, bool]:
    """(type without `| None`, whether None is a value of it); where a word may stand for a number, int."""
    parts = typing.get_args(field.type) if isinstance(field.type, types.UnionType) else (field.type,)
    return parts[0], type(None) in parts


def all_fields(schema: type, prefix: str = "") -> Iterator[tuple[str, "dataclasses.Field[Any]"]]:
    """(key, field) of every setting of a schema, through its sections."""
    for field in dataclasses.fields(schema):
        if isinstance(field.type, type) and dataclasses.is_dataclass(field.type):
            yield from all_fields(field.type, f"{prefix}{field.name}.")
        else:
            yield prefix + field.name, field


def requirement(field: "dataclasses.Field[Any]", entry: bool = False) -> str:
    """What a value of this field, or an entry of its list or table, must be: `must be a whole number, at
    least 1; the default is 60`."""
    plain, _ = plain_type(field)
    limits = allowed(field)
    if isinstance(limits, Choices):
        return f"use one of {limits.words()}"
    kind = (typing.get_args(plain) or (plain,))[-1]
    noun = {int: "whole number", float: "number", str: "text"}.get(kind, "value")
    origin = None if entry else typing.get_origin(plain)
    what = "true or false" if kind is bool else f"a {noun}"
    if origin is list and dataclasses.is_dataclass(kind):
        names = ", ".join(field.name for field in dataclasses.fields(kind))
        return f"must be a list of tables, written [{{KEY: value}}], with the keys {names}"
    if origin is list:
        what = f"a list of {noun}s, written [a,b]"
    elif origin is dict:
        what = f"a table of {noun}s, written {{NAME: value}}"
    bound = f", {limits.words()}" if isinstance(limits, Bounds) and limits != Bounds() else ""
    return f"must be {what}{bound}{'' if entry else _or_default(field)}"


def _or_default(field: "dataclasses.Field[Any]") -> str:
    default = "" if field.default is dataclasses.MISSING else f"; the default is {shown(field.default)}"
    return f"{', or null' if plain_type(field)[1] else ''}{default}"


def shown(value: object) -> str:
    """A value as it is written on the command line."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list):
        return f"[{','.join(map(shown, value))}]"
    return "(empty)" if value == "" else str(value)


def wrong_values(config: Any, prefix: str = "") -> list[str]:
    """One line for each value that is outside its bounds or choices, in the order of the schema."""
    lines = []
    for field in dataclasses.fields(config):
        key, value = prefix + field.name, getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            lines += wrong_values(value, f"{key}.")
            continue
        limits = allowed(field)
        for name, entry in _entries(key, value):
            if isinstance(limits, Choices) and not limits.hold(entry):
                nearest = did_you_mean(str(entry), limits.names)
                lines.append(f"{name}={shown(entry)}: {requirement(field)}{nearest}")
            elif dataclasses.is_dataclass(entry):
                lines += wrong_values(entry, f"{name}.")
            elif plain_type(field)[0] == list[str] and not isinstance(entry, str):
                lines.append(f"{name}={shown(value)}: {requirement(field)}")
            elif isinstance(limits, Bounds) and entry is not None and not limits.hold(entry):
                given = f"{entry:g}" if isinstance(entry, float) else shown(entry)
                lines.append(f"{name}={given}: must be {limits.words_for(entry)}{_or_default(field)}")
    return lines


def _entries(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The value, or each entry of a list (under its key, a section under its index) or table (own key)."""
    if isinstance(value, dict):
        yield from ((f"{key}.{name}", entry) for name, entry in value.items())
    elif isinstance(value, list):
        for index, entry in enumerate(value):
            yield (f"{key}[{index}]" if dataclasses.is_dataclass(entry) else key), entry
    else:
        yield key, value
