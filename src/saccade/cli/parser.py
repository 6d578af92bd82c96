"""Generates a command's flags from the fields of its settings. The first source that has a setting wins: its flag, the
`--config` file, its environment variable, the command's own default, the field's default."""

import json
from argparse import SUPPRESS, Action, ArgumentParser, ArgumentTypeError, BooleanOptionalAction, Namespace
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn, TypeVar, get_type_hints

import yaml

from saccade.cli.groups import HELP_ALL, Group, HelpAction, first_sentence, name_of
from saccade.cli.values import is_list, keeps_commas, read_value, reader_of, shown
from saccade.config import ENVIRONMENT_PREFIX, environment, flag_of
from saccade.errors import ConfigError

Settings = TypeVar("Settings")


class Parser(ArgumentParser):
    """The parser of one command. `words` shows the positional arguments in the usage line, such as [MODEL]."""

    def __init__(self, name: str, *, words: str = "", max_words: int = 0, about: str = "") -> None:
        usage = f"saccade {name} {words} [flags]".replace("  ", " ")
        super().__init__(f"saccade {name}", usage=usage, description=about, add_help=False, allow_abbrev=False)
        self.name, self.max_words = name, max_words
        self.groups: list[Group] = []
        self.kinds: dict[str, Any] = {}
        self.aliases: dict[str, str] = {}  # other engines' names of settings, allowed in the config file
        self._foreign: set[str] = set()  # flags of other engines
        self._unsuggested: set[str] = set()  # the foreign flags that set nothing
        self._own_defaults: dict[str, Any] = {}
        general = self.new_group("general", "settings can also come from a file or the environment")
        general.add("--config", metavar="FILE", help="YAML file with settings; flags override it")
        general.add("-h", "--help", action=HelpAction, help="show help: for a GROUP, for a word, or for all flags")
        general.add(HELP_ALL, action=HelpAction, help=SUPPRESS)

    def new_group(self, name: str, about: str) -> Group:
        group = Group(self, name, about)
        self.groups.append(group)
        return group

    def add_settings(self, settings: type[Any], **defaults: Any) -> None:
        """Adds a flag for each field: `--max-model-len` for `max_model_len`, with the field's type, default and help.
        `defaults` are this command's own. A field that an earlier settings class already has shares its flag."""
        group = self.new_group(name_of(settings), first_sentence(settings.__doc__ or ""))
        types = get_type_hints(settings, include_extras=True)
        for field in fields(settings):
            if field.name not in self.kinds:
                self._add_field(group, field, types[field.name], defaults.get(field.name, field.default))

    def add_foreign(self, flag: str, *, sets: bool = True, **how: Any) -> None:
        """Adds a flag of another engine. If it `sets` nothing, it is never suggested in place of an unknown flag."""
        self.add_argument(flag, default=SUPPRESS, help=SUPPRESS, **how)
        self._foreign.add(flag)
        if not sets:
            self._unsuggested.add(flag)

    def read(self, argv: Sequence[str]) -> Namespace:
        """Returns the settings from all sources, with `words` (positional arguments), `chosen` (names of settings that
        are not defaults), `notes` for the user, and `command`."""
        before, rest = _split(argv)
        given, extras = self.parse_known_args(before)
        for extra in extras:
            if extra.startswith("-") and extra != "-":
                self.refuse_unknown(extra.split("=")[0])
        words = [*extras, *rest]
        chosen = self._from_environment()
        chosen |= self._from_file(getattr(given, "config", None) or environment().get("config"))
        notes = dict.fromkeys((*chosen.pop("notes", ()), *getattr(given, "notes", ())))
        graph_words = (*chosen.pop("graph_words", ()), *getattr(given, "graph_words", ()))
        chosen |= {name: value for name, value in vars(given).items() if name not in ("notes", "graph_words")}
        if graph_words:
            chosen["graphs"] = ",".join(filter(None, (*graph_words, chosen.get("graphs", ""))))
        values = {**self._own_defaults, **chosen}
        if self.max_words and "model" in vars(given):
            words = self._with_model(given.model, words)
        elif self.max_words and "model" in values and not words:
            words = [values["model"]]
        if len(words) > self.max_words:
            self.error(f"unexpected {words[self.max_words]!r}; usage: {self.usage}")
        read = {"command": self.name, "words": words, "chosen": frozenset(chosen), "notes": tuple(notes)}
        return Namespace(**{**values, **read})

    def _with_model(self, model: str, words: list[str]) -> list[str]:
        """Puts the model of `--model` in front of the words."""
        if len(words) == self.max_words and words[0] != model:
            self.error(f"two models were given, {words[0]!r} and --model {model!r}; give one")
        return words if len(words) == self.max_words else [model, *words]

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} (see `saccade {self.name} --help`)")

    def knows(self, flag: str) -> bool:
        return flag in self._option_string_actions

    def refuse_unknown(self, flag: str) -> NoReturn:
        known = [text for text in self._option_string_actions if text.startswith("--")]
        known = [text for text in known if text not in self._unsuggested]
        self.error(f"unknown flag {flag}{did_you_mean(flag, known)}")

    def _add_field(self, group: Group, field: Field[Any], kind: Any, default: Any) -> None:
        assert default is not MISSING, f"{field.name} has no default"
        self.kinds[field.name], self._own_defaults[field.name] = kind, default
        flag = flag_of(field.name)
        note = f" (default: {shown(default)})" if default not in ("", None, ()) and default is not False else ""
        text = (field.metadata.get("help", "") + note).replace("%", "%%")
        if kind is bool:
            group.add(flag, action=BooleanOptionalAction, help=text)
        elif is_list(kind):
            group.add(flag, action=Gather, type=reader_of(kind), metavar=_metavar(kind), help=f"{text}; repeatable")
        else:
            group.add(flag, type=reader_of(kind), metavar=_metavar(kind), help=text)

    def _from_environment(self) -> dict[str, Any]:
        found = environment()
        return {
            name: _read(f"{ENVIRONMENT_PREFIX}{name.upper()}", reader_of(kind), found[name])
            for name, kind in self.kinds.items()
            if name in found
        }

    def _from_file(self, path: str | None) -> dict[str, Any]:
        if not path:
            return {}
        values: dict[str, Any] = {}
        foreign: list[str] = []
        for key, value in _read_yaml(Path(path)).items():
            name = str(key).replace("-", "_")
            name = self.aliases.get(name, name)
            if name in ("model", "model_path") and self.max_words:
                values["model"] = _read(f"{path}: {key}", lambda v: read_value(str, v), value)
            elif name in self.kinds:
                kind = self.kinds[name]
                values[name] = _read(f"{path}: {key}", lambda v, kind=kind: read_value(kind, v), value)
            elif (flag := flag_of(name)) in self._foreign:
                foreign += _as_flag(flag, value)
            else:
                known = [name.replace("_", "-") for name in self.kinds]
                self.error(f"{path}: unknown setting {key}{did_you_mean(str(key), known)}")
        try:
            return {**vars(self.parse_known_args(foreign)[0]), **values}
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from None


class Gather(Action):
    def __call__(self, parser: ArgumentParser, namespace: Namespace, values: Any, option_string: Any = None) -> None:
        setattr(namespace, self.dest, (*getattr(namespace, self.dest, ()), *values))


def settings_from(flags: Namespace, settings: type[Settings], defaults: Mapping[str, Any] | None = None) -> Settings:
    """Builds one settings class. `defaults` apply to fields that the user did not set."""
    names = [field.name for field in fields(settings)]  # type: ignore[arg-type]
    own = {name: value for name, value in (defaults or {}).items() if name in names and name not in flags.chosen}
    return settings(**{name: own.get(name, getattr(flags, name)) for name in names})


def did_you_mean(word: str, known: Sequence[str]) -> str:
    """Suggests known words as a suffix for an error about an unknown one; empty if none is close."""
    close = get_close_matches(word, known, n=2, cutoff=0.6)
    bare = word.strip("-")
    close = close or [text for text in known if bare and bare in text][:2]
    return f"; did you mean {' or '.join(close)}?" if close else ""


def _split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    at = list(argv).index("--") if "--" in argv else len(argv)
    return list(argv[:at]), list(argv[at + 1 :])


def _as_flag(flag: str, value: Any) -> list[str]:
    """Turns another engine's setting in a config file into arguments; a switch that is false gives none."""
    if isinstance(value, bool):
        return [flag] * value
    if isinstance(value, list):
        return [flag, *map(str, value)]
    return [flag, json.dumps(value) if isinstance(value, dict) else str(value)]


def _read(where: str, read: Any, value: Any) -> Any:
    try:
        return read(value)
    except ArgumentTypeError as error:
        raise ConfigError(f"{where}: {error}") from None


def _read_yaml(path: Path) -> Mapping[Any, Any]:
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror} (--config)") from None
    except (ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} cannot be read as YAML: {error} (--config)") from None
    except RecursionError:
        raise ConfigError(f"{path} is nested too deeply (--config)") from None
    if not isinstance(found or {}, dict):
        raise ConfigError(f"{path} contains a {type(found).__name__}; settings are `name: value` lines (--config)")
    return found or {}


def _metavar(kind: Any) -> str:
    names = {int: "N", float: "X", str: "TEXT"}
    if keeps_commas(kind):
        return "TEXT"
    return names.get(kind, "A,B")
