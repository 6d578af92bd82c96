"""What flags of other engines do: set one of our settings, do nothing with a note, or stop with a reason."""

from argparse import Action, ArgumentParser, Namespace
from collections.abc import Mapping
from typing import Any


class Ignore(Action):
    """Accepts a flag without effect and notes what happens instead."""

    def __init__(self, option_strings: list[str], dest: str, *, note: str, **how: Any) -> None:
        super().__init__(option_strings, dest, **how)
        self.note = note

    def __call__(self, parser: ArgumentParser, namespace: Namespace, values: Any, option_string: Any = None) -> None:
        add_note(namespace, f"{option_string} changes nothing: {self.note}")


class Refuse(Action):
    """Stops the command, unless the flag has a neutral value, which asks for what happens anyway."""

    def __init__(self, option_strings: list[str], dest: str, *, reason: str, neutral: frozenset[str], **how: Any):
        super().__init__(option_strings, dest, nargs="?", **how)
        self.reason, self.neutral = reason, neutral

    def __call__(self, parser: ArgumentParser, namespace: Namespace, values: Any, option_string: Any = None) -> None:
        if str(values or "").lower() not in self.neutral:
            parser.error(f"{option_string} is refused: {self.reason}")


class Translate(Action):
    """Translates another engine's value of a setting into ours."""

    def __init__(self, option_strings: list[str], dest: str, *, words: Mapping[str, Any], **how: Any) -> None:
        super().__init__(option_strings, dest, **how)
        self.words = words

    def __call__(self, parser: ArgumentParser, namespace: Namespace, values: Any, option_string: Any = None) -> None:
        if values not in self.words:
            parser.error(f"{option_string} is {values!r}; allowed are {', '.join(self.words)}")
        setattr(namespace, self.dest, self.words[values])


class GraphWord(Action):
    """Adds a word to --graphs, before the words of --graphs itself: the last word for a phase wins."""

    def __init__(self, option_strings: list[str], dest: str, *, word: str, **how: Any) -> None:
        super().__init__(option_strings, dest, nargs=0, **how)
        self.word = word

    def __call__(self, parser: ArgumentParser, namespace: Namespace, values: Any, option_string: Any = None) -> None:
        namespace.graph_words = (*getattr(namespace, "graph_words", ()), self.word)


class Budget(Action):
    """Handles SGLang's two limits on the prompt tokens of a batch: the smaller one wins."""

    def __call__(self, parser: ArgumentParser, namespace: Namespace, values: Any, option_string: Any = None) -> None:
        if values < 0:
            add_note(
                namespace,
                f"{option_string} {values}: prompts longer than --max-num-batched-tokens still take several steps; "
                "raise that to --max-model-len to compute every prompt in one step",
            )
            return
        setattr(namespace, self.dest, min(values, getattr(namespace, self.dest, values)))


def add_note(namespace: Namespace, note: str) -> None:
    namespace.notes = tuple(dict.fromkeys((*getattr(namespace, "notes", ()), note)))
