"""A command of `laminar`: what it is called with, and how argparse reads its words."""

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from laminar_hpc.config.errors import Refused, did_you_mean

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace

WIDE = 60  # columns of an example; what a longer one does follows right behind it
KEYS = "[key=value ...]"


def elsewhere(module: str, function: str = "main") -> Callable[..., Any]:
    """The function of a module that is imported only when the function is called."""
    return lambda *given: getattr(importlib.import_module(f"laminar_hpc.{module}"), function)(*given)


def flag(about: str) -> dict[str, Any]:
    """An option without a value."""
    return {"action": "store_true", "help": about}


def value(metavar: str, about: str, alone: str | None = None, **more: Any) -> dict[str, Any]:
    """An option with a value, or `alone` where that may be left out."""
    more |= {} if alone is None else {"nargs": "?", "const": alone}
    return {"metavar": metavar, "help": about, **more}


def several(metavar: str, about: str) -> dict[str, Any]:
    """An option that may be given more than once."""
    return value(metavar, about, action="append", default=[])


CONFIG_DIR = several("DIR", "a folder of your own beside conf/, with experiment/NAME.yaml")
PLAN = value("FILE", "the experiment that laminar plan has written")


@dataclass(frozen=True)
class Subcommand:
    """A row of COMMANDS."""

    run: Callable[["Namespace"], int]  # takes options and `words` (the rest); the exit code
    about: str
    examples: dict[str, str]  # a command line -> what it does
    places: tuple[str, ...] = ()  # the words that it needs
    options: dict[str, dict[str, Any]] = field(default_factory=dict)  # their flags -> what argparse is told
    more: str = ""  # words that may follow; whoever reads them refuses what is not one
    names: Callable[[], list[str]] = list  # what the first word may be
    help: Callable[[], str] = str

    def usage(self, name: str, options_max: int = 9) -> str:
        more = [self.more] if self.more else []
        options = [
            f"[{flags.split()[0]} {told.get('metavar', '')}".rstrip() + "]"
            for flags, told in self.options.items()
        ]
        options = options if len(options) <= options_max else ["[OPTION ...]"]
        return " ".join(["laminar", name, *self.places, *more, *options])

    def parser(self, name: str) -> "ArgumentParser":
        from argparse import ArgumentParser, RawDescriptionHelpFormatter  # `laminar --help` does without

        width = min(WIDE, max(map(len, self.examples)))
        examples = [f"  {words:<{width}}  {text}".rstrip() for words, text in self.examples.items()]
        made = ArgumentParser(
            usage=self.usage(name),
            description="\n".join([self.about, "", "examples", *examples]),
            formatter_class=RawDescriptionHelpFormatter,
            add_help=False,
            allow_abbrev=False,
            exit_on_error=False,
        )
        for flags, told in self.options.items():
            made.add_argument(*flags.split(), **told)
        return made

    def page(self, name: str) -> str:
        """What `--help` prints."""
        parser = self.parser(name)
        parser.epilog = self.help()
        return parser.format_help().rstrip()

    def parse(self, name: str, given: Sequence[str]) -> "Namespace":
        """Raises Refused for unknown options, options without their value, and too few or too many words."""
        from argparse import ArgumentError

        try:
            options, words = self.parser(name).parse_known_args(self._joined(given))
        except ArgumentError as error:
            raise Refused([f"{error.argument_name}: {error.message}; usage: {self.usage(name)}"]) from None
        options.words = [*words, *(f"--config-dir={d}" for d in vars(options).get("config_dir", ()))]
        if wrong := self._wrong_words(name, words):
            raise Refused(f"{line}; usage: {self.usage(name)}" for line in wrong)
        return options

    def _joined(self, given: Sequence[str]) -> list[str]:
        """With `--option VALUE` as `--option=VALUE`: a value may begin with a dash, or be left out."""
        by_flag = {flag: told for flags, told in self.options.items() for flag in flags.split()}
        left, words = list(given), list[str]()
        while left:
            word = left.pop(0)
            told = by_flag.get(word, {})
            if told.get("nargs") == "?":
                named = left and left[0] in told.get("choices", ())
                word = f"{word}={left.pop(0) if named else told['const']}"
            elif "metavar" in told and left:
                word = f"{word}={left.pop(0)}"
            words.append(word)
        return words

    def _wrong_words(self, name: str, words: Sequence[str]) -> list[str]:
        strange = [word for word in words if word.startswith("-")]
        given = [word for word in words if word not in strange]
        if self.more and (not self.places or (words and words[0] in given and "=" not in words[0])):
            return []
        flags, count = " ".join(self.options).split(), 0 if self.more else len(given)
        lines = [f"{word}: no such option{did_you_mean(word.partition('=')[0], flags)}" for word in strange]
        if names := self.names():
            lines = [f"{self.places[0]} is missing: name one of {', '.join(names)}, or a run"]
        elif lacking := self.places[count:]:
            lines.append(f"laminar {name} needs {' '.join(lacking)}")
        if more := " ".join(given[len(self.places) :]):
            lines.append(f"{more}: one word too many; quote a name that has spaces")
        return lines
