"""What a user writes on the command line, `key=value` words, read with the schema at hand. Imports no torch.

A text is taken as it stands behind the `=`, whatever signs it has; lists and tables are read by Hydra's
grammar, and so are casts of numbers, as `steps=int(3)`. Whatever cannot be meant is answered with what to
write instead. `+key` is `key`: only tables can be added to, and they need no sign. `~key` takes an entry out
of a table.
"""

import contextlib
import difflib
import re
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

from laminar_hpc.config import peers
from laminar_hpc.config.bounds import Choices, all_fields, allowed, plain_type, requirement
from laminar_hpc.config.errors import did_you_mean
from laminar_hpc.config.schema import RENAMED
from laminar_hpc.config.yaml_text import load_yaml

_QUOTED = re.compile(r"'[^']*'|\"[^\"]*\"")
_SCALAR = re.compile(r"true|false|null|-?\d+(\.\d+)?")  # of a table whose values may be anything
_WHOLE = re.compile(r"-?\d+")
_NUMBERS = (int, float, bool)
_YAML = (".yaml", ".yml")
_FILE = "for a file DIR/experiment/NAME.yaml write --config-dir DIR experiment=NAME"
_SPECIAL = "spaces or any of ,:=[]{}()$~ in it"


@dataclass
class Words:
    """A command line as read."""

    groups: dict[str, str] = field(default_factory=dict)  # `experiment=demo`: the file of each group
    settings: list[tuple[str, Any]] = field(default_factory=list)  # (key, value), which may still be text
    removed: list[str] = field(default_factory=list)  # `~key`: tables, or their entries, to be emptied first
    wrong: list[str] = field(default_factory=list)  # a line for each word that cannot be meant
    broken: bool = False  # nothing can be said of the rest


class Keys:
    """The keys of a schema: settings, sections, tables (with any entries), and groups of files beside it."""

    def __init__(
        self,
        schema: type,
        groups: Mapping[str, Sequence[str]],
        place: str,
        instead: Mapping[str, str] | None = None,
    ) -> None:
        """`place`: where or what the keys are; `instead`: what to write for words that are none."""
        self.fields = dict(all_fields(schema))
        self.sections = {key.rpartition(".")[0] for key in self.fields} - {""}
        self.tables = {key for key, f in self.fields.items() if typing.get_origin(plain_type(f)[0]) is dict}
        self.groups = groups
        self.place = place
        self.instead = instead or {}

    def table_of(self, key: str) -> str | None:
        """The table that a key is an entry of."""
        return next((table for table in self.tables if key.startswith(f"{table}.")), None)

    def kind_of(self, key: str) -> tuple[Any, bool] | None:
        """(type, whether null is a value) of a setting, a table's entry or a section; None for no key."""
        if table := self.table_of(key):
            return typing.get_args(plain_type(self.fields[table])[0])[1], False
        if key in self.fields:
            return plain_type(self.fields[key])
        return (dict, False) if key in self.sections else None

    def names_in(self, section: str) -> list[str]:
        return [name.removeprefix(f"{section}.") for name in self.fields if name.startswith(f"{section}.")]

    def unknown(self, key: str) -> str:
        """The line for a key that is not there: its new name, the nearest ones, or those of its section."""
        if key in RENAMED and RENAMED[key] in self.fields:
            return f"{key} is called {RENAMED[key]} now"
        if key.startswith("hydra"):
            return f"{key}: Hydra's own settings are not taken; a run writes to run_dir alone"
        if key in self.instead:
            return f"{key}: {self.instead[key]}"
        if theirs := peers.ours(key, self.fields):
            return f"{key}: {theirs}"
        section, _, last = key.rpartition(".")
        by_last: dict[str, list[str]] = {}
        for name in [*self.fields, *self.groups]:
            by_last.setdefault(name.rpartition(".")[2], []).append(name)
        near = by_last.get(last) or difflib.get_close_matches(key, list(self.fields), 1, 0.8)
        endings = difflib.get_close_matches(last, list(by_last), 1, 0.7)
        near = near or [name for ending in endings for name in by_last[ending]]
        hint = f" (did you mean {' or '.join(near[:3])}?)" if near else ""
        if not near and section in self.sections:
            hint = f"; those of {section} are {', '.join(self.names_in(section))}"
        return f"{key}: no such key{hint}; the keys are {self.place}"

    def read(self, words: Sequence[str]) -> Words:
        parsed, index = Words(), 0
        while index < len(words):
            key, equals, _ = words[index].partition("=")
            if key[:1] == "~" and not equals and (self.table_of(key[1:]) or key[1:] in self.tables):
                parsed.removed.append(key[1:])
                index += 1
            elif key and equals and key[0] not in "-~":
                self._word(words[index], parsed)
                index += 1
            else:
                line, taken = self._misshapen(words, index)
                parsed.wrong.append(line)
                parsed.broken = True
                index += taken
        return parsed

    def _misshapen(self, words: Sequence[str], index: int) -> tuple[str, int]:
        """(what to write instead, for how many words), from a word on that is no key=value."""
        word, rest, before = words[index], words[index + 1 :], words[index - 1] if index else ""
        loose = [word, *takewhile(lambda w: "=" not in w and not w.startswith("-"), rest)]
        if word.startswith("~"):
            return f"{word}: {self._instead_of_removing(word[1:].partition('=')[0])}", 1
        if word.startswith("-"):
            return self._option(word, loose[1:2])
        if rest and rest[0].startswith("="):
            spaced = words[index : index + (3 if rest[0] == "=" else 2)]
            text = f"{' '.join(spaced)}: write {quoted(''.join(spaced))}, without spaces around ="
            return text, len(spaced)
        if before.endswith("="):
            text = f"{before} {word}: write {quoted(before + ' '.join(loose))}, without spaces around ="
            return text, len(loose)
        if self._takes_text(before):
            whole = quoted(" ".join([before, *loose]))
            text = f"{' '.join(loose)}: not key=value; if it belongs to the value before it, write {whole}"
            return text, len(loose)
        if group := next((group for group, names in self.groups.items() if word in names), None):
            return f"{word}: write {group}={word}", 1
        if self.kind_of(word):
            return f"{word}: write {word}=VALUE", 1
        if word.endswith(_YAML):
            return f"{word}: {_FILE}", 1
        return f"{word}: not key=value{did_you_mean(word, [*self.fields, *self.groups])}", 1

    def _instead_of_removing(self, key: str) -> str:
        if key in self.groups:
            return f"a group cannot be removed; leave it out, or write {key}=NAME"
        if table := self.table_of(key) or (key in self.tables and key):
            return f"write ~{key} without a value; it takes the entry out of {table}"
        null = f"write {key}=null" if (kind := self.kind_of(key)) and kind[1] else "null is no value of it"
        tables = ", ".join(sorted(self.tables))
        return f"a setting cannot be removed; leave it out; {null}; ~ takes entries out of {tables}"

    def _option(self, word: str, after: Sequence[str]) -> tuple[str, int]:
        name, equals, value = word.lstrip("-").partition("=")
        taken = () if equals else after
        written, plain = " ".join([word, *taken]), "settings are key=value, without dashes"
        if theirs := peers.ours(word.partition("=")[0], self.fields):
            return f"{written}: {theirs}; {plain}", 1 + len(taken)
        if name.startswith("config"):
            return f"{written}: no such option; {_FILE}", 1 + len(taken)
        if not (equals or self.kind_of(name) or name in self.groups):
            return f"{word}: no such option; {plain}; --help shows examples", 1
        instead = quoted(f"{name}={value or ' '.join(taken) or 'VALUE'}")
        return f"{written}: write {instead}; {plain}", 1 + len(taken)

    def _takes_text(self, word: str) -> bool:
        kind = self.kind_of(word.partition("=")[0].lstrip("+"))
        return kind is not None and (typing.get_args(kind[0]) or (kind[0],))[-1] is str

    def _word(self, word: str, parsed: Words) -> None:
        """One `key=value` into `parsed`."""
        key, _, text = word.partition("=")
        key = key.lstrip("+")
        kind = self.kind_of(key)
        # pipeline={...} sets keys of the section of that name
        if key in self.groups and not text.startswith("{"):
            names = self.groups[key]
            if text in names:
                parsed.groups[key] = text
            else:
                file = f"; {_FILE}" if text.endswith(_YAML) else ""
                hint = _sweep_hint(word) or did_you_mean(text, names) or file
                parsed.wrong.append(f"{word}: use one of {', '.join(names)}{hint}")
                parsed.broken = True
        elif kind is None:
            parsed.wrong.append(self.unknown(key))
        elif kind[1] and text == "null":
            parsed.settings.append((key, None))
        elif kind[0] is Any and text.startswith("{"):
            self._composite(key, text, dict, parsed)
        elif (typing.get_origin(kind[0]) or kind[0]) in (list, dict):
            self._composite(key, text, typing.get_origin(kind[0]) or kind[0], parsed)
        elif hint := _sweep_hint(word) if self._is_plain(key, kind[0]) else "":
            parsed.wrong.append(f"{key}={text}: {self.requirement(key)}{hint}")
        elif kind[0] in _NUMBERS and (cast := _parsed(word)) is not None:
            parsed.settings.append((key, cast.value()))
        elif kind[0] is int and _WHOLE.fullmatch(text):  # before the library takes it for a word
            parsed.settings.append((key, int(text)))
        elif self.table_of(key) and kind[0] is Any and _SCALAR.fullmatch(text):
            parsed.settings.append((key, load_yaml(text)))
        else:
            parsed.settings.append((key, text[1:-1] if _QUOTED.fullmatch(text) else text))

    def _is_plain(self, key: str, kind: object) -> bool:
        """Whether a key takes a number, true or false, or one of some names: no text of any signs."""
        return kind in _NUMBERS or (key in self.fields and isinstance(allowed(self.fields[key]), Choices))

    def requirement(self, key: str) -> str:
        """What the value of a key must be, in words."""
        if key in self.sections:
            return f"a section, not a value; its keys are {', '.join(self.names_in(key))}"
        table = self.table_of(key)
        return requirement(self.fields[table or key], entry=table is not None)

    def _composite(self, key: str, text: str, kind: type, parsed: Words) -> None:
        """A list or a table, by Hydra's grammar."""
        value: Any = None
        if text.startswith("${"):
            parsed.settings.append((key, text))
            return
        with contextlib.suppress(HydraException):
            value = OverridesParser.create().parse_override(f"key={text}").value()
        if isinstance(value, kind):
            parsed.settings.append((key, value))
        elif key in self.sections:
            some = ", ".join(f"{key}.{name}" for name in self.names_in(key)[:3])
            parsed.wrong.append(f"{key}={text}: {key} is a section; set its keys: {some}, ...")
        elif kind is dict:
            parsed.wrong.append(f"{key}={text}: not a table; write {key}.NAME=VALUE")
        elif text.startswith("["):
            example = f"'{key}=[\"a b\",c]'"
            parsed.wrong.append(
                f"{key}={text}: not a list; quote an entry that has {_SPECIAL}, like {example}"
            )
        else:
            parsed.wrong.append(f"{key}={text}: not a list; write {quoted(f'{key}=[{text}]')}")


def _parsed(word: str) -> Override | None:
    """A word by Hydra's grammar, where it is more than a plain value: a cast, a choice or a range."""
    if not {",", "("} & set(word):
        return None
    with contextlib.suppress(HydraException):
        return OverridesParser.create().parse_override(word)
    return None


def _sweep_hint(word: str) -> str:
    override = _parsed(word)
    several = override is not None and override.is_sweep_override()
    return "; several values, one run each, need laminar train --multirun" if several else ""


def quoted(word: str) -> str:
    """The word as a shell has to be given it."""
    return word if re.fullmatch(r"[\w@%+=:,./-]+", word) else "'" + word.replace("'", "'\\''") + "'"
