"""Questions about two pictures, a video, an unknown picture, or no picture. B samples, K places."""

from collections.abc import Mapping

import torch
from torch import Tensor

from training.dialogue import REPLIES, Turn
from training.drafts import Draft
from training.language import COLORS, MAX_NUMBER, RELATIONS, SHAPES
from training.questions import subject
from training.scenes import Script, Shapes

STRANGE_QUESTIONS: Mapping[str, float] = (
    {
        "describe": 2.5,
        "shape": 0.5,
        "color": 0.3,
        "shape and color": 1.0,
        "shape and side": 0.2,
        "shape and height": 0.2,
    }
    | {"count all": 0.4, "count and name": 0.3, "count shape": 0.3, "count color": 0.15, "count and color": 0.2}
    | {"digit": 0.4, "number": 0.2, "digit and color": 0.2, "read": 0.4, "word and color": 0.2}
    | {"color of": 0.3, "has shape": 0.3, "has both": 0.15, "where": 0.2, "relation": 0.2, "shape at": 0.2}
    | {"thing at": 0.2, "colors of two": 0.1, "on the left": 0.1}
)
"""Questions about pictures that show nothing the model knows, with their weights."""

BLIND_QUESTIONS = (
    *("shape", "color", "count all", "describe", "digit", "read", "count shape", "color of", "has shape"),
    *("shape and color", "word and color", "describe pair"),
)
"""Some of the questions that are asked without a picture."""


def ask_pair(first: Shapes, second: Shapes, num_words: int, turns: int = 1) -> list[Turn]:
    """Asks about two pictures of shapes."""
    draft = Draft(first.shape.shape[0], first.shape.device)
    num = torch.stack([first.present.sum(1), second.present.sum(1)], 1)
    shape, _ = subject(first, share=0.8)
    other, _ = subject(second, share=0.8)
    shape = torch.where(torch.rand(draft.batch, device=draft.device) < 0.5, shape, other)
    has = torch.stack([((part.shape == shape[:, None]) * part.present).sum(1) for part in (first, second)], 1)
    draft.offer("more", 2.5 * (has[:, 0] != has[:, 1]), "which", shape=shape, which=has[:, 1] > has[:, 0])
    draft.offer("more all", 1.0 * (num[:, 0] != num[:, 1]), "which", which=num[:, 1] > num[:, 0])
    only_one = (has[:, 0] > 0) != (has[:, 1] > 0)
    draft.offer("which has", 1.0 * only_one, "which", shape=shape, which=has[:, 1] > 0)
    alone = (num == 1).all(1)
    draft.offer("same shape", 1.5 * alone, "yes", yes=first.shape[:, 0] == second.shape[:, 0])
    draft.offer("same color", 1.0 * alone, "yes", yes=first.color[:, 0] == second.color[:, 0])
    which = torch.randint_like(shape, 2)
    seen = torch.where(which == 0, first.shape[:, 0], second.shape[:, 0])
    color = torch.where(which == 0, first.color[:, 0], second.color[:, 0])
    single = num.gather(1, which[:, None])[:, 0] == 1
    draft.offer("shape in", 1.2 * single, "shape", which=which, shape=seen)
    draft.offer("color in", 0.8 * single, "color", which=which, color=color)
    _describe_pair(draft, first, second, num)
    draft.unknown(0.02, num_words)
    return draft.turns(turns)


def _describe_pair(draft: Draft, first: Shapes, second: Shapes, num: Tensor) -> None:
    """Describes a picture of one thing by its name, and one of several by their number."""
    reply = torch.where(num[:, 0] > 1, REPLIES.index("many and one"), REPLIES.index("two"))
    several = torch.where(num[:, 0] > 1, REPLIES.index("many and many"), REPLIES.index("one and many"))
    columns = {"shape": first.shape[:, 0], "shape1": second.shape[:, 0], "number": num[:, 0], "number1": num[:, 1]}
    columns |= {"color": first.color[:, 0], "color1": second.color[:, 0]}
    for kind, weight in (("describe pair", 1.2), ("describe", 0.6)):
        draft.offer(kind, weight, torch.where(num[:, 1] > 1, several, reply), **columns)


def ask_digit_pair(first: Script, second: Script, num_words: int, turns: int = 1) -> list[Turn]:
    draft = Draft(len(first.length), first.length.device)
    which = torch.randint_like(first.length, 2)
    digit = torch.where(which == 0, first.characters[:, 0], second.characters[:, 0])
    single = torch.where(which == 0, first.length, second.length) == 1
    none = torch.full_like(digit, 10)
    blank = {"digit1": none, "digit2": none, "digit3": none}
    draft.offer("digit in", 2.0 * single, "digits", which=which, digit=digit, **blank)
    both = (first.length == 1) & (second.length == 1)
    larger = second.characters[:, 0] > first.characters[:, 0]
    differ = both & (second.characters[:, 0] != first.characters[:, 0])
    draft.offer("larger", 1.0 * differ, "which", which=larger, digit=digit)
    for kind, weight in (("describe pair", 0.6), ("describe", 0.3)):
        draft.offer(kind, weight * both, "two digits", digit=first.characters[:, 0], digit1=second.characters[:, 0])
    draft.unknown(0.02, num_words)
    return draft.turns(turns)


def ask_video(facts: Shapes, way: Tensor, growth: Tensor, num_words: int, turns: int = 1) -> list[Turn]:
    """`growth` is -1 if the first shape moves, 0 if it grows, 1 if it shrinks."""
    draft = Draft(len(way), way.device)
    shape, moves = facts.shape[:, 0], growth < 0
    alone = facts.present.sum(1) == 1
    differs = alone | (facts.shape[:, 1] != shape)
    draft.offer("move", 4.0 * (moves & alone), "way", shape=shape, way=way)
    draft.offer("grow", 4.0 * (~moves & differs), "size", shape=shape, size=growth.clamp(min=0))
    draft.offer("shape moves", 0.8 * (alone | moves), "shape", shape=shape)
    draft.offer("color moves", 0.8 * (alone | moves), "color", color=facts.color[:, 0])
    draft.unknown(0.02, num_words)
    return draft.turns(turns)


def ask_nothing(batch: int, num_words: int, device: torch.device, turns: int = 1) -> list[Turn]:
    """Asks without a picture."""
    draft = Draft(batch, device)
    a, b = (torch.randint(0, 11, (batch,), device=device) for _ in range(2))
    draft.offer("sum", 2.0, "result", number=a, number1=b, number2=a + b)
    high, low = torch.maximum(a, b), torch.minimum(a, b)
    draft.offer("difference", 1.5, "result", number=high, number1=low, number2=high - low)
    c, d = (torch.randint(0, MAX_NUMBER // 2 + 1, (batch,), device=device) for _ in range(2))
    draft.offer("is larger", 1.5 * (c != d), "yes", number=c, number1=d, yes=c > d)
    word = torch.randint(0, num_words, (batch,), device=device)
    draft.offer("copy", 1.5, "copy", word=word)
    draft.offer("hello", 0.4, "hello")
    draft.offer("who", 0.6, "who")
    draft.unknown(1.5, num_words)
    for kind in BLIND_QUESTIONS:
        draft.offer(kind, 0.1, "blind", shape=torch.randint_like(word, len(SHAPES)))
    return draft.turns(turns)


def ask_strange(batch: int, num_words: int, device: torch.device, turns: int = 1) -> list[Turn]:
    """Asks about a picture that shows nothing the model knows."""
    draft = Draft(batch, device)
    sizes = {
        "shape": len(SHAPES),
        "shape1": len(SHAPES),
        "color": len(COLORS),
        "relation": 2 * len(RELATIONS),
        "edge": 4,
    }
    columns = {name: torch.randint(0, size, (batch,), device=device) for name, size in sizes.items()}
    for kind, weight in STRANGE_QUESTIONS.items():
        draft.offer(kind, weight, "strange", later=draft.seldom(0.05), **columns)
    draft.unknown(0.5, num_words)
    return draft.turns(turns)
