"""Reads what an answer says, whatever its wording: things with their colors, facts, or that it does not know."""

import re
from collections import Counter
from collections.abc import Iterable

from saccade.eval.drawing import COLORS, SHAPES

PLURALS = {name: name + ("es" if name.endswith("s") else "s") for name in SHAPES}
_NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
_SAME = {plural: name for name, plural in PLURALS.items()} | {"grey": "gray", "upper": "top", "lower": "bottom"}
_SAME |= {word: str(number) for number, word in enumerate(_NUMBERS)}
_SIDES = ("left", "right", "top", "bottom")
_REFUSAL = re.compile(
    r"\b(do not|don't|cannot|can't|can not) (know|tell|recogni[sz]e|name|say)\b|\bunknown\b|\bnot sure\b"
)
Named = tuple[str, str]
"""A color and a shape; "" if one of them is not named."""


def words(text: str) -> list[str]:
    """Words in lower case and in one form: singular, American spelling, numbers as digits."""
    return [_SAME.get(word, word) for word in re.findall(r"[a-z]+|\d+", text.casefold())]


def is_refusal(text: str) -> bool:
    return _REFUSAL.search(text.casefold()) is not None


def things(text: str) -> Counter[Named]:
    """Counts the things an answer names. A color belongs to the shape after it, or to one before it without a color."""
    found: Counter[Named] = Counter()
    color = shape = ""
    number = 1
    for word in words(text):
        if word.isdigit():
            number = int(word)
        elif word in COLORS:
            if color or shape:
                found[(word, shape) if shape else (color, "")] += number
                color, shape, number = ("", "", 1) if shape else (word, "", 1)
            else:
                color = word
        elif word in SHAPES:
            if color:
                found[color, word] += number
                color, number = "", 1
            else:
                if shape:
                    found["", shape] += number
                shape = word
    if color or shape:
        found[color, shape] += number
    return found


def has_facts(text: str, wanted: Iterable[str]) -> bool:
    """Whether the answer names all these facts, and no other color, shape, side or number where one is wanted."""
    said, needed = set(words(text)), {word for fact in wanted for word in words(fact)}
    kinds = (frozenset(COLORS), frozenset(SHAPES), frozenset(_SIDES), frozenset(filter(str.isdigit, said | needed)))
    return needed <= said and all(said & kind == needed & kind for kind in kinds if needed & kind)
