"""Resolves settings in one place: flag, else environment variable, else default, all validated together."""

import argparse
import enum
import functools
import logging
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

logger = logging.getLogger(__name__)

T = TypeVar("T")

_INTEGER = re.compile(r"[+-]?[0-9]+\Z")
_LARGEST = 2**63 - 1
_TRUE = ("1", "true", "yes", "on")
_FALSE = ("0", "false", "no", "off")


class Source(enum.Enum):
    """Where a setting's value came from."""

    FLAG = "flag"
    ENVIRONMENT = "environment"
    DEFAULT = "default"


@dataclass(frozen=True)
class Setting(Generic[T]):
    """Declares a setting: its names, its default and what it accepts."""

    name: str
    variable: str
    default: T
    parse: Callable[[str], T]
    """Turns text into a value; raises ValueError for what is not accepted."""
    accepted: str
    """What is accepted, as it stands after "expected" in an error: "python or rust"."""
    flag: str | None = None
    """Option string such as "--servicer-impl"; its value stands in the namespace as text or None."""
    replaced: tuple[str, ...] = ()
    """Deprecated variables that are still read, in order, when `variable` is unset."""
    help: str = ""
    """A sentence for the flag's help text."""

    @property
    def dest(self) -> str | None:
        """Name of the flag in an argparse namespace."""
        return None if self.flag is None else self.flag.lstrip("-").replace("-", "_")

    def label(self, variable: str | None = None) -> str:
        """Name the flag and the variable, as errors do."""
        variable = variable or self.variable
        return variable if self.flag is None else f"{self.flag} ({variable})"


@dataclass(frozen=True)
class Value(Generic[T]):
    """A resolved value and where it came from."""

    value: T
    source: Source


class ConfigurationError(Exception):
    """The operator's settings cannot be used; each of `lines` names one problem."""

    exit_code = 2

    def __init__(self, lines: Iterable[str]) -> None:
        self.lines = tuple(lines)
        super().__init__("\n".join(self.lines))


class Settings(Mapping[str, Any]):
    """Resolved settings by name: `settings["drain_secs"]` is the value itself."""

    def __init__(self, values: Mapping[str, Value[Any]]) -> None:
        self._values = dict(values)

    def __getitem__(self, name: str) -> Any:
        return self._values[name].value

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return f"Settings({ {name: (v.value, v.source.value) for name, v in self._values.items()} })"

    def source(self, name: str) -> Source:
        """Return where a setting's value came from; raises KeyError for an unknown name."""
        return self._values[name].source

    def given(self, name: str) -> bool:
        """Tell whether the operator set it, by flag or variable."""
        return self.source(name) is not Source.DEFAULT


Check = Callable[[Settings], str | None]


def resolve(
    settings: Iterable[Setting[Any]],
    args: argparse.Namespace | None,
    environ: Mapping[str, str],
    checks: Iterable[Check] = (),
) -> Settings:
    """Resolve settings from a namespace and an environment; an empty variable counts as unset.

    Each check sees the result and returns a problem or None; with problems already found, a check that needs a
    setting without a value is left out. Raises ConfigurationError with every problem found.
    """
    values: dict[str, Value[Any]] = {}
    problems: list[str] = []
    for setting in settings:
        text, source, variable = _given(setting, args, environ)
        if text is None:
            values[setting.name] = Value(setting.default, source)
            continue
        try:
            values[setting.name] = Value(setting.parse(text), source)
        except ValueError:
            problems.append(f"{setting.label(variable)}: {text!r} is not accepted; expected {setting.accepted}")
    resolved = Settings(values)
    for check in checks:
        try:
            problem = check(resolved)
        except KeyError:
            if not problems:
                raise
            continue
        if problem is not None:
            problems.append(problem)
    if problems:
        raise ConfigurationError(problems)
    return resolved


def add_flags(parser: argparse.ArgumentParser, settings: Iterable[Setting[Any]], group: str) -> None:
    """Add each setting's flag to a parser, in an argument group; option strings the parser has are left alone."""
    missing = [s for s in settings if s.flag is not None and s.flag not in parser._option_string_actions]
    if not missing:
        return
    section = parser.add_argument_group(group)
    for setting in missing:
        default = "unset" if setting.default is None else setting.default
        facts = f"Accepts {setting.accepted}. Default: {default}. Variable: {setting.variable}."
        section.add_argument(
            str(setting.flag),
            dest=setting.dest,
            type=str,
            default=None,
            metavar=setting.name.upper(),
            help=f"{setting.help} {facts}".strip().replace("%", "%%"),
        )


def _given(
    setting: Setting[Any], args: argparse.Namespace | None, environ: Mapping[str, str]
) -> tuple[str | None, Source, str]:
    """Return the text to parse (None: take the default), its source, and the variable to name in an error."""
    for old in setting.replaced:
        if environ.get(old):
            _warn_replaced(old, setting.label())
    flagged = getattr(args, setting.dest, None) if setting.dest is not None else None
    if flagged is not None:
        return str(flagged), Source.FLAG, setting.variable
    for variable in (setting.variable, *setting.replaced):
        if text := environ.get(variable):
            return text, Source.ENVIRONMENT, variable
    return None, Source.DEFAULT, setting.variable


@functools.cache  # one line a process, however often a launcher parses its command line
def _warn_replaced(old: str, new: str) -> None:
    logger.warning("%s is deprecated; use %s", old, new)


def _integer(text: str, smallest: int, largest: int) -> int:
    if not _INTEGER.match(text) or len(text) > 20 or not smallest <= int(text) <= largest:
        raise ValueError(f"{text!r} is not an integer from {smallest} to {largest}")
    return int(text)


def positive_int(text: str) -> int:
    """Parse an integer from 1 to 2**63 - 1."""
    return _integer(text, 1, _LARGEST)


def non_negative_int(text: str) -> int:
    """Parse an integer from 0 to 2**63 - 1."""
    return _integer(text, 0, _LARGEST)


def port(text: str) -> int:
    """Parse a TCP port, 0 (any free one) to 65535."""
    return _integer(text, 0, 65535)


def seconds(text: str) -> float:
    """Parse a finite number of seconds, 0 or more."""
    value = float(text) if text.isascii() and "_" not in text else math.nan
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"{text!r} is not a number of seconds")
    return abs(value)


def positive_seconds(text: str) -> float:
    """Parse a finite number of seconds above 0."""
    value = seconds(text)
    if value == 0:
        raise ValueError("0 seconds are not accepted")
    return value


def choice(*names: str) -> Callable[[str], str]:
    """Return a parser for one of some names in any case; it returns the name as declared."""
    by_folded = {name.casefold(): name for name in names}

    def parse(text: str) -> str:
        try:
            return by_folded[text.casefold()]
        except KeyError:
            raise ValueError(f"{text!r} is none of {', '.join(names)}") from None

    return parse


def flag_value(text: str) -> bool:
    """Parse a switch: 1/true/yes/on or 0/false/no/off, in any case."""
    folded = text.casefold()
    if folded in _TRUE:
        return True
    if folded in _FALSE:
        return False
    raise ValueError(f"{text!r} is neither of {'/'.join(_TRUE)} nor {'/'.join(_FALSE)}")


def text(text: str) -> str:
    """Accept any text as it is."""
    return text
