"""Questions about one picture, with their answers. B samples, K places."""

from typing import NamedTuple

import torch
from torch import Tensor

from training.dialogue import REPLIES, Turn
from training.drafts import Columns, Draft
from training.language import COLORS, SHAPES
from training.scenes import Script, Shapes

DOWN = 0.3
"""The weight of the vertical place in the order of a description; the horizontal one has weight 1."""


def ask_shapes(
    facts: Shapes, num_words: int, turns: int = 1, *, counting: float = 1.0, longer: float = 1.0
) -> list[Turn]:
    """Asks about shapes. Counts are asked `counting` times as often as usual; for `longer` see Draft."""
    draft = Draft(facts.shape.shape[0], facts.shape.device, longer)
    num = facts.present.sum(1)
    unique = _unique(facts.shape, facts.present)
    _ask_names(draft, facts, unique, num)
    _ask_counts(draft, facts, num, counting)
    _ask_presence(draft, facts)
    _ask_places(draft, facts, unique, num)
    _ask_edges(draft, facts, unique, num)
    _ask_spots(draft, facts, num)
    _ask_description(draft, facts, num)
    draft.unknown(0.05, num_words)
    return draft.turns(turns, unique.sum(1) > 2)


def _ask_names(draft: Draft, facts: Shapes, unique: Tensor, num: Tensor) -> None:
    """Offers questions about names and colors. If there are several things, each question is about another."""
    alone = num == 1
    draft.offer("shape", 2.0 * alone, "shape", shape=facts.shape[:, 0])
    draft.offer("color", 2.0 * alone, "color", color=facts.color[:, 0])
    draft.offer("shape and color", 2.0 * alone, "one", shape=facts.shape[:, 0], color=facts.color[:, 0])
    by_shape, has_shape = _pick(unique)
    shape, color = _at(facts.shape, by_shape), _at(facts.color, by_shape)
    draft.offer("color of", (2.2 - 1.8 * alone) * has_shape, "color", shape=shape, color=color)
    single = _unique(facts.color, facts.present)
    other = single.scatter(1, by_shape[:, None], 0.0)
    by_color, has_color = _pick(torch.where((alone | ~has_shape)[:, None], single, other))
    shape, color = _at(facts.shape, by_color), _at(facts.color, by_color)
    draft.offer("shape of", (1.2 - 0.9 * alone) * has_color, "shape", shape=shape, color=color)
    two = _two(facts, unique)
    draft.offer("colors of two", 0.8 * two.exist, "two colors", **two.names, **two.colors)


def _ask_counts(draft: Draft, facts: Shapes, num: Tensor, counting: float) -> None:
    """Offers counts, mostly of things in the picture, sometimes of any; each question draws its own."""
    wanted = torch.where(num > 1, 1.0, 0.25) * counting
    draft.offer("count all", 0.8 * wanted, "number", number=num)
    shape, _ = subject(facts)
    is_shape = (facts.shape == shape[:, None]) * facts.present
    draft.offer("count shape", 2.0 * wanted, "number", shape=shape, number=is_shape.sum(1))
    _, color = subject(facts)
    is_color = (facts.color == color[:, None]) * facts.present
    draft.offer("count color", 0.8 * wanted, "number", color=color, number=is_color.sum(1))
    shape, color = subject(facts)
    both = ((facts.shape == shape[:, None]) & (facts.color == color[:, None])) * facts.present
    draft.offer("count both", 0.6 * wanted, "number", shape=shape, color=color, number=both.sum(1))
    shape, _ = subject(facts)
    other, _ = subject(facts)
    counts = {
        name: ((facts.shape == asked[:, None]) * facts.present).sum(1)
        for name, asked in (("number", shape), ("number1", other))
    }
    draft.offer("counts of two", 0.6 * wanted * (shape != other), "two counts", shape=shape, shape1=other, **counts)
    _ask_count_and_color(draft, facts, wanted)


def _ask_count_and_color(draft: Draft, facts: Shapes, wanted: Tensor) -> None:
    """Offers number and color of the things of one shape, if they share a color."""
    index, _ = _pick(facts.present)
    shape, color = _at(facts.shape, index), _at(facts.color, index)
    is_shape = (facts.shape == shape[:, None]) * facts.present
    alike = ((facts.color == color[:, None]) | (is_shape == 0)).all(1)
    number = is_shape.sum(1)
    reply = torch.where(number > 1, REPLIES.index("counted things"), REPLIES.index("counted thing"))
    draft.offer("count and color", 1.0 * wanted * alike, reply, shape=shape, color=color, number=number)


def _ask_presence(draft: Draft, facts: Shapes) -> None:
    """Half of the questions are about something in the picture; the others may be by chance."""
    true_shape, true_color = subject(facts, share=1.0)
    coin = torch.rand(draft.batch, 2, device=draft.device) < 0.5
    shape = torch.where(coin[:, 0], true_shape, torch.randint_like(true_shape, len(SHAPES)))
    color = torch.where(coin[:, 1], true_color, torch.randint_like(true_color, len(COLORS)))
    shown = facts.present > 0
    is_shape, is_color = (facts.shape == shape[:, None]) & shown, (facts.color == color[:, None]) & shown
    draft.offer("has shape", 0.5, "yes", later=0.7, shape=shape, yes=is_shape.any(1))
    draft.offer("has color", 0.2, "yes", later=0.7, color=color, yes=is_color.any(1))
    draft.offer("has both", 0.6, "yes", later=0.7, shape=shape, color=color, yes=(is_shape & is_color).any(1))


class _Two(NamedTuple):
    """Two things of different shapes: their names, and how they are placed; sides are 0..3, as in SLOTS."""

    names: dict[str, Tensor]
    colors: dict[str, Tensor]
    exist: Tensor
    clear_x: Tensor
    clear_y: Tensor
    side_x: Tensor
    side_y: Tensor
    is_plain: Tensor
    main: Tensor


def _two(facts: Shapes, unique: Tensor) -> _Two:
    first, has_first = _pick(unique)
    second, has_second = _pick(unique.scatter(1, first[:, None], 0.0))
    margin = 0.11 * min(facts.height, facts.width) + 0.3 * (_at(facts.radius, first) + _at(facts.radius, second))
    dx, dy = _at(facts.x, first) - _at(facts.x, second), _at(facts.y, first) - _at(facts.y, second)
    side_x, side_y = (dx > 0).long(), 2 + (dy > 0).long()
    mostly_x, mostly_y = dx.abs() > 1.5 * dy.abs() + margin, dy.abs() > 1.5 * dx.abs() + margin
    return _Two(
        {"shape": _at(facts.shape, first), "shape1": _at(facts.shape, second)},
        {"color": _at(facts.color, first), "color1": _at(facts.color, second)},
        has_first & has_second,
        dx.abs() > margin,
        dy.abs() > margin,
        side_x,
        side_y,
        mostly_x | mostly_y,
        torch.where(mostly_x, side_x, side_y),
    )


def _ask_places(draft: Draft, facts: Shapes, unique: Tensor, num: Tensor) -> None:
    """Draws three pairs of things, so that an answer rarely gives the next one away if there are more than two."""
    for kind, weight, has_colors in (("relation", 2.5, False), ("relation both", 0.6, True)):
        two = _two(facts, unique)
        by_x = two.clear_x & (~two.clear_y | (torch.rand(draft.batch, device=draft.device) < 0.5))
        truth = torch.where(by_x, two.side_x, two.side_y)
        asked = torch.where(torch.rand(draft.batch, device=draft.device) < 0.5, truth, truth ^ 1)
        columns = two.names | {"relation": asked * 2 + torch.randint_like(asked, 2), "yes": asked == truth}
        either = two.exist & (two.clear_x | two.clear_y)
        draft.offer(kind, weight * either, "yes", **columns, **(two.colors if has_colors else {}))
    draft.offer("where", 3.5 * (two.exist & two.is_plain), "side", **two.names, side=two.main)
    two = _two(facts, unique)
    draft.offer("left or right", 2.0 * (two.exist & two.clear_x), "side", **two.names, side=two.side_x)
    draft.offer("above or below", 2.0 * (two.exist & two.clear_y), "side", **two.names, side=two.side_y)
    facing = two.main * 2 + torch.randint_like(two.main, 2)
    only_two = two.exist & (num == 2) & two.is_plain
    draft.offer("next to", 0.8 * only_two, "shape", **two.names, relation=facing)


def _ask_edges(draft: Draft, facts: Shapes, unique: Tensor, num: Tensor) -> None:
    """Offers questions about the half of the picture that something is in; left or right and top or bottom are drawn
    separately."""
    alone = num == 1
    for kind, suffix, places, size, base in (
        ("on the left", "side", facts.x, facts.width, 0),
        ("at the top", "height", facts.y, facts.height, 2),
    ):
        index, exists = _pick(unique)
        off = _at(places, index) - size / 2
        clear = exists & (off.abs() > 0.1 * size)
        there = {"shape": _at(facts.shape, index), "edge": base + (off > 0).long()}
        draft.offer(kind, 1.0 * clear, "edge", **there)
        draft.offer(f"shape and {suffix}", 0.8 * (clear & alone), "shape there", **there)
        draft.offer(f"color and {suffix}", 0.4 * clear, "color there", **there, color=_at(facts.color, index))


def _ask_spots(draft: Draft, facts: Shapes, num: Tensor) -> None:
    """Asks what is closest to an edge, if that is clear. The model must search by place instead of naming one."""
    for places, size, base in ((facts.x, facts.width, 0), (facts.y, facts.height, 2)):
        is_far = torch.randint(0, 2, (draft.batch,), device=draft.device)
        signed = torch.where(is_far[:, None] > 0, -places, places).masked_fill(facts.present == 0, 1e6)
        nearest, index = signed.topk(2, largest=False)
        clear = (num > 1) & (nearest[:, 1] - nearest[:, 0] > 0.15 * size)
        shape, color = _at(facts.shape, index[:, 0]), _at(facts.color, index[:, 0])
        draft.offer("shape at", 1.0 * clear, "shape", shape=shape, edge=base + is_far)
        draft.offer("color at", 0.6 * clear, "color", color=color, edge=base + is_far)
        draft.offer("thing at", 0.5 * clear, "one", shape=shape, color=color, edge=base + is_far)


def _ask_description(draft: Draft, facts: Shapes, num: Tensor) -> None:
    """Describes up to three shapes from left to right, and from top to bottom if they are above each other; for more,
    only the number."""
    along = facts.x / facts.width + DOWN * facts.y / facts.height
    order = along.masked_fill(facts.present == 0, 1e6).argsort(1)
    shape, color = facts.shape.gather(1, order), facts.color.gather(1, order)
    columns = {f"shape{k or ''}": shape[:, k] for k in range(3)} | {f"color{k or ''}": color[:, k] for k in range(3)}
    reply = REPLIES.index("one") + (num.long() - 1).clamp(0, 2)
    reply = torch.where(num > 3, torch.full_like(reply, REPLIES.index("many")), reply)
    draft.offer("describe", 0.8, reply, later=0.5, **columns, number=num)
    counted = REPLIES.index("counted one") + (num.long() - 1).clamp(0, 2)
    draft.offer("count and name", 0.5 * (num < 4), counted, later=0.5, **columns, number=num)


def ask_digits(script: Script, num_words: int, turns: int = 1, *, longer: float = 1.0) -> list[Turn]:
    draft = Draft(len(script.length), script.length.device, longer)
    alone = script.length == 1
    spelled = _columns("digit", script.characters, 4, 10)
    draft.offer("digit", 4.0 * alone, "digits", **spelled)
    draft.offer("number", 4.0 * ~alone, "digits", **spelled)
    _ask_digit_traits(draft, script, spelled, alone)
    draft.unknown(0.1, num_words)
    return draft.turns(turns)


def ask_script(script: Script, is_number: Tensor, num_words: int, turns: int = 1, *, longer: float = 1.0) -> list[Turn]:
    draft = Draft(len(script.length), script.length.device, longer)
    letters = ~is_number
    spelled = _columns("letter", script.characters.masked_fill(is_number[:, None], 26), 7, 26)
    draft.offer("read", 7.0 * letters, "letters", **spelled)
    draft.offer("describe", 0.8 * letters, "the word", **spelled)
    draft.offer("color of text", 0.5 * letters, "color", later=draft.seldom(0.3), color=script.color)
    draft.offer("word and color", 0.6 * letters, "the word in color", color=script.color, **spelled)
    draft.offer("letters", 0.4 * letters, "number", number=script.length)
    draft.offer("first letter", 0.5 * letters, "letters", **_columns("letter", script.characters[:, :1], 7, 26))
    last = script.characters.gather(1, script.length[:, None] - 1).clamp(max=26)
    draft.offer("last letter", 0.5 * letters, "letters", **_columns("letter", last, 7, 26))
    digits = script.characters.masked_fill(letters[:, None], 10)
    numbered = _columns("digit", digits, 4, 10)
    alone = is_number & (script.length == 1)
    draft.offer("digit", 3.0 * alone, "digits", **numbered)
    draft.offer("number", 3.0 * is_number, "digits", **numbered)
    draft.offer("read", 1.5 * is_number, "digits", **numbered)
    draft.unknown(0.1, num_words)
    return draft.turns(turns)


def _ask_digit_traits(draft: Draft, script: Script, spelled: Columns, alone: Tensor) -> None:
    first = script.characters[:, 0]
    guess = torch.where(torch.rand(draft.batch, device=draft.device) < 0.5, first, torch.randint_like(first, 10))
    draft.offer("is digit", 0.5 * alone, "yes", digit=guess, yes=guess == first)
    draft.offer("color of digit", 0.5, "color", later=draft.seldom(0.3), color=script.color)
    draft.offer("describe", 0.6 * alone, "the digit", **spelled)
    draft.offer("describe", 0.6 * ~alone, "the number", **spelled)
    for which, reply in ((alone, "the digit in color"), (~alone, "the number in color")):
        draft.offer("digit and color", 0.6 * which, reply, color=script.color, **spelled)


def subject(facts: Shapes, share: float = 0.88) -> tuple[Tensor, Tensor]:
    """Draws a shape and a color. Each is, independently, one of the picture in `share` of all cases, else any."""
    index, _ = _pick(facts.present)
    coin = torch.rand(len(index), 2, device=index.device) < share
    shape, color = _at(facts.shape, index), _at(facts.color, index)
    shape = torch.where(coin[:, 0], shape, torch.randint_like(shape, len(SHAPES)))
    return shape, torch.where(coin[:, 1], color, torch.randint_like(color, len(COLORS)))


def _unique(values_BK: Tensor, present_BK: Tensor) -> Tensor:
    """1.0 for present things whose value no other present thing has."""
    same = (values_BK[:, :, None] == values_BK[:, None]) * present_BK[:, None]
    return (same.sum(-1) == 1) * present_BK


def _pick(allowed_BK: Tensor) -> tuple[Tensor, Tensor]:
    """Picks a random allowed place; also says whether there is one."""
    score = torch.rand(allowed_BK.shape, device=allowed_BK.device) * allowed_BK
    return score.argmax(1), allowed_BK.sum(1) > 0


def _at(values_BK: Tensor, index: Tensor) -> Tensor:
    return values_BK.gather(1, index[:, None])[:, 0]


def _columns(name: str, characters: Tensor, num: int, blank: int) -> dict[str, Tensor]:
    none = torch.full_like(characters[:, 0], blank)
    columns = [characters[:, k] if k < characters.shape[1] else none for k in range(num)]
    return {f"{name}{k or ''}": column for k, column in enumerate(columns)}
