"""What can be asked about a scene, and the answer. B samples, K places, Q kinds of questions."""

from collections.abc import Mapping

import torch
from torch import Tensor

from training.dialogue import KINDS, REPLIES, VALUES, Turn
from training.language import COLORS, MAX_NUMBER, SHAPES
from training.scenes import Script, Shapes

Columns = Mapping[str, Tensor]
MAX_OFFERS = 32
_ALIKE = ("describe", "read", "number", "digit")


class Draft:
    """A turn being written. Every kind of question is offered with a weight (B,), its reply and its values; one of
    those with a weight above zero is chosen."""

    def __init__(self, batch: int, device: torch.device, before: Turn | None = None) -> None:
        """What the turn `before` has already told is not asked again."""
        self.batch, self.device = batch, device
        self.asked = None if before is None else before.kind
        self.best = torch.full((batch,), -1e9, device=device)
        self.kind = torch.full((batch,), KINDS.index("unknown"), device=device)
        self.reply = torch.full((batch,), REPLIES.index("unknown"), device=device)
        self.values: dict[str, Tensor] = {}
        self.noise = -torch.rand(batch, MAX_OFFERS, device=device).clamp(1e-9, 1 - 1e-7).log().neg().log()
        self.offers = 0

    def offer(self, kind: str, weight: Tensor | float, reply: str | Tensor, **columns: Tensor) -> None:
        """`weight` may be a number; several offers of a kind count together."""
        noise = self.noise[:, self.offers]
        self.offers += 1
        weights = torch.full_like(noise, weight) if isinstance(weight, float) else weight.float()
        if self.asked is not None:
            for same in _ALIKE if kind in _ALIKE else (kind,):
                weights = weights * (self.asked != KINDS.index(same))
        score = weights.clamp(min=1e-30).log() + noise
        wins = (score > self.best) & (weights > 0)
        self.best = torch.where(wins, score, self.best)
        self.kind = self.kind.masked_fill(wins, KINDS.index(kind))
        if isinstance(reply, str):
            self.reply = self.reply.masked_fill(wins, REPLIES.index(reply))
        else:
            self.reply = torch.where(wins, reply, self.reply)
        for name, column in columns.items():
            old = self.values.get(name)
            column = column.long()
            self.values[name] = column if old is None else torch.where(wins, column, old)

    def turn(self) -> Turn:
        zero = torch.zeros(self.batch, dtype=torch.long, device=self.device)
        return Turn(self.kind, self.reply, torch.stack([self.values.get(name, zero) for name in VALUES], 1))

    def unknown(self, weight: float, num_words: int) -> None:
        word = torch.randint(0, num_words, (self.batch,), device=self.device)
        self.offer("unknown", weight, "unknown", word=word)


def ask_shapes(facts: Shapes, num_words: int, before: Turn | None = None) -> Turn:
    draft = Draft(facts.shape.shape[0], facts.shape.device, before)
    num = facts.present.sum(1)
    _ask_names(draft, facts, num)
    _ask_counts(draft, facts)
    _ask_presence(draft, facts)
    _ask_places(draft, facts, num)
    _ask_description(draft, facts, num)
    draft.unknown(0.05, num_words)
    return draft.turn()


def _ask_names(draft: Draft, facts: Shapes, num: Tensor) -> None:
    alone = num == 1
    draft.offer("shape", 2.0 * alone, "shape", shape=facts.shape[:, 0])
    draft.offer("color", 2.0 * alone, "color", color=facts.color[:, 0])
    by_shape, has_shape = _pick(_unique(facts.shape, facts.present))
    draft.offer(
        "color of", 1.2 * has_shape, "color", shape=_at(facts.shape, by_shape), color=_at(facts.color, by_shape)
    )
    by_color, has_color = _pick(_unique(facts.color, facts.present))
    draft.offer(
        "shape of", 1.2 * has_color, "shape", shape=_at(facts.shape, by_color), color=_at(facts.color, by_color)
    )


def _ask_counts(draft: Draft, facts: Shapes) -> None:
    """Mostly of what is there, sometimes of anything."""
    shape, color = _subject(facts)
    is_shape, is_color = facts.shape == shape[:, None], facts.color == color[:, None]
    draft.offer("count all", 0.8, "number", number=facts.present.sum(1))
    draft.offer("count shape", 1.5, "number", shape=shape, number=(is_shape * facts.present).sum(1))
    draft.offer("count color", 0.9, "number", color=color, number=(is_color * facts.present).sum(1))
    both = (is_shape & is_color) * facts.present
    draft.offer("count both", 0.7, "number", shape=shape, color=color, number=both.sum(1))


def _ask_presence(draft: Draft, facts: Shapes) -> None:
    """Half of the questions are about something of the picture. Others may hit something of it by chance."""
    true_shape, true_color = _subject(facts, share=1.0)
    coin = torch.rand(draft.batch, 2, device=draft.device) < 0.5
    shape = torch.where(coin[:, 0], true_shape, torch.randint_like(true_shape, len(SHAPES)))
    color = torch.where(coin[:, 1], true_color, torch.randint_like(true_color, len(COLORS)))
    shown = facts.present > 0
    is_shape, is_color = (facts.shape == shape[:, None]) & shown, (facts.color == color[:, None]) & shown
    draft.offer("has shape", 0.7, "yes", shape=shape, yes=is_shape.any(1))
    draft.offer("has color", 0.5, "yes", color=color, yes=is_color.any(1))
    draft.offer("has both", 0.8, "yes", shape=shape, color=color, yes=(is_shape & is_color).any(1))


def _ask_places(draft: Draft, facts: Shapes, num: Tensor) -> None:
    unique = _unique(facts.shape, facts.present)
    first, has_first = _pick(unique)
    second, has_second = _pick(unique.scatter(1, first[:, None], 0.0))
    two = has_first & has_second
    margin = 0.11 * min(facts.height, facts.width) + 0.3 * (_at(facts.radius, first) + _at(facts.radius, second))
    dx, dy = _at(facts.x, first) - _at(facts.x, second), _at(facts.y, first) - _at(facts.y, second)
    clear_x, clear_y = dx.abs() > margin, dy.abs() > margin
    side_x, side_y = (dx > 0).long(), 2 + (dy > 0).long()
    names = {"shape": _at(facts.shape, first), "shape1": _at(facts.shape, second)}
    colors = {"color": _at(facts.color, first), "color1": _at(facts.color, second)}
    by_x = clear_x & (~clear_y | (torch.rand_like(dx) < 0.5))
    truth = torch.where(by_x, side_x, side_y)
    asked = torch.where(torch.rand_like(dx) < 0.5, truth, truth ^ 1)
    relation = asked * 2 + torch.randint_like(asked, 2)
    either = two & (clear_x | clear_y)
    draft.offer("relation", 1.5 * either, "yes", **names, relation=relation, yes=asked == truth)
    draft.offer("relation both", 0.6 * either, "yes", **names, **colors, relation=relation, yes=asked == truth)
    draft.offer("left or right", 1.2 * (two & clear_x), "side", **names, side=side_x)
    draft.offer("above or below", 1.2 * (two & clear_y), "side", **names, side=side_y)
    mostly_x, mostly_y = dx.abs() > 1.5 * dy.abs() + margin, dy.abs() > 1.5 * dx.abs() + margin
    main = torch.where(mostly_x, side_x, side_y)
    draft.offer("where", 1.3 * (two & (mostly_x | mostly_y)), "side", **names, side=main)
    facing = torch.where(mostly_x, side_x, side_y) * 2 + torch.randint_like(asked, 2)
    draft.offer("next to", 1.0 * (two & (num == 2) & (mostly_x | mostly_y)), "shape", **names, relation=facing)
    off_x, off_y = _at(facts.x, first) - facts.width / 2, _at(facts.y, first) - facts.height / 2
    shape = _at(facts.shape, first)
    left_right = has_first & (off_x.abs() > 0.1 * facts.width)
    draft.offer("on the left", 1.2 * left_right, "edge", shape=shape, edge=(off_x > 0).long())
    top_bottom = has_first & (off_y.abs() > 0.1 * facts.height)
    draft.offer("at the top", 1.2 * top_bottom, "edge", shape=shape, edge=2 + (off_y > 0).long())


def _ask_description(draft: Draft, facts: Shapes, num: Tensor) -> None:
    """Up to three shapes from left to right, where that is clear; of more only the number."""
    order = facts.x.masked_fill(facts.present == 0, 1e6).argsort(1)
    x = facts.x.masked_fill(facts.present == 0, 1e6).gather(1, order)
    is_clear = ((x[:, 1:3] - x[:, :2]) > 0.06 * facts.width).cumprod(1)
    clear = torch.cat([torch.ones_like(is_clear[:, :1]), is_clear], 1)
    shape, color = facts.shape.gather(1, order), facts.color.gather(1, order)
    columns = {f"shape{k or ''}": shape[:, k] for k in range(3)} | {f"color{k or ''}": color[:, k] for k in range(3)}
    reply = torch.full_like(draft.reply, REPLIES.index("one")) + (num.long() - 1).clamp(0, 2)
    reply = torch.where(num > 3, torch.full_like(reply, REPLIES.index("many")), reply)
    is_fine = (clear.gather(1, (num.long() - 1).clamp(0, 2)[:, None])[:, 0] > 0) | (num > 3)
    draft.offer("describe", 1.0 * is_fine, reply, **columns, number=num)


def ask_digits(script: Script, num_words: int, before: Turn | None = None) -> Turn:
    draft = Draft(len(script.length), script.length.device, before)
    alone = script.length == 1
    spelled = _columns("digit", script.characters, 4, 10)
    draft.offer("digit", 4.0 * alone, "digits", **spelled)
    draft.offer("number", 4.0 * ~alone, "digits", **spelled)
    _ask_digit_traits(draft, script, spelled, alone)
    draft.unknown(0.15, num_words)
    return draft.turn()


def ask_script(script: Script, is_number: Tensor, num_words: int, before: Turn | None = None) -> Turn:
    draft = Draft(len(script.length), script.length.device, before)
    letters = ~is_number
    spelled = _columns("letter", script.characters.masked_fill(is_number[:, None], 26), 7, 26)
    draft.offer("read", 7.0 * letters, "letters", **spelled)
    draft.offer("describe", 0.8 * letters, "the word", **spelled)
    draft.offer("color of text", 0.5 * letters, "color", color=script.color)
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
    draft.unknown(0.15, num_words)
    return draft.turn()


def _ask_digit_traits(draft: Draft, script: Script, spelled: Columns, alone: Tensor) -> None:
    first = script.characters[:, 0]
    guess = torch.where(torch.rand(draft.batch, device=draft.device) < 0.5, first, torch.randint_like(first, 10))
    draft.offer("is digit", 0.5 * alone, "yes", digit=guess, yes=guess == first)
    draft.offer("color of digit", 0.5, "color", color=script.color)
    draft.offer("describe", 0.6 * alone, "the digit", **spelled)
    draft.offer("describe", 0.6 * ~alone, "the number", **spelled)


def ask_pair(first: Shapes, second: Shapes) -> Turn:
    """About two pictures of shapes."""
    draft = Draft(first.shape.shape[0], first.shape.device)
    num = torch.stack([first.present.sum(1), second.present.sum(1)], 1)
    shape, _ = _subject(first, share=0.5)
    other, _ = _subject(second, share=0.5)
    shape = torch.where(torch.rand(draft.batch, device=draft.device) < 0.5, shape, other)
    has = torch.stack([((part.shape == shape[:, None]) * part.present).sum(1) for part in (first, second)], 1)
    draft.offer("more", 1.5 * (has[:, 0] != has[:, 1]), "which", shape=shape, which=has[:, 1] > has[:, 0])
    draft.offer("more all", 1.0 * (num[:, 0] != num[:, 1]), "which", which=num[:, 1] > num[:, 0])
    only_one = (has[:, 0] > 0) != (has[:, 1] > 0)
    draft.offer("which has", 1.0 * only_one, "which", shape=shape, which=has[:, 1] > 0)
    alone = (num == 1).all(1)
    draft.offer("same shape", 2.0 * alone, "yes", yes=first.shape[:, 0] == second.shape[:, 0])
    draft.offer("same color", 2.0 * alone, "yes", yes=first.color[:, 0] == second.color[:, 0])
    which = torch.randint_like(shape, 2)
    seen = torch.where(which == 0, first.shape[:, 0], second.shape[:, 0])
    color = torch.where(which == 0, first.color[:, 0], second.color[:, 0])
    single = num.gather(1, which[:, None])[:, 0] == 1
    draft.offer("shape in", 1.5 * single, "shape", which=which, shape=seen)
    draft.offer("color in", 1.5 * single, "color", which=which, color=color)
    return draft.turn()


def ask_digit_pair(first: Script, second: Script) -> Turn:
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
    return draft.turn()


def ask_video(facts: Shapes, way: Tensor, growth: Tensor) -> Turn:
    """`growth` is -1 where the first shape moves, 0 where it grows, 1 where it shrinks."""
    draft = Draft(len(way), way.device)
    shape, moves = facts.shape[:, 0], growth < 0
    alone = facts.present.sum(1) == 1
    differs = alone | (facts.shape[:, 1] != shape)
    draft.offer("move", 4.0 * (moves & alone), "way", shape=shape, way=way)
    draft.offer("grow", 4.0 * (~moves & differs), "size", shape=shape, size=growth.clamp(min=0))
    draft.offer("shape moves", 0.8 * (alone | moves), "shape", shape=shape)
    draft.offer("color moves", 0.8 * (alone | moves), "color", color=facts.color[:, 0])
    return draft.turn()


def ask_nothing(batch: int, num_words: int, device: torch.device, before: Turn | None = None) -> Turn:
    """Text alone."""
    draft = Draft(batch, device, before)
    a, b = (torch.randint(0, 11, (batch,), device=device) for _ in range(2))
    draft.offer("sum", 3.0, "result", number=a, number1=b, number2=a + b)
    high, low = torch.maximum(a, b), torch.minimum(a, b)
    draft.offer("difference", 1.5, "result", number=high, number1=low, number2=high - low)
    c, d = (torch.randint(0, MAX_NUMBER // 2 + 1, (batch,), device=device) for _ in range(2))
    draft.offer("is larger", 1.5 * (c != d), "yes", number=c, number1=d, yes=c > d)
    word = torch.randint(0, num_words, (batch,), device=device)
    draft.offer("copy", 3.0, "copy", word=word)
    draft.offer("hello", 0.4, "hello")
    draft.offer("who", 0.6, "who")
    draft.unknown(2.5, num_words)
    for kind in ("shape", "color", "count all", "describe", "digit", "read", "count shape", "color of", "has shape"):
        draft.offer(kind, 0.12, "blind", shape=torch.randint_like(word, len(SHAPES)))
    return draft.turn()


def _subject(facts: Shapes, share: float = 0.88) -> tuple[Tensor, Tensor]:
    """A shape and a colour, each for itself of the picture in `share` of all cases, else any."""
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
    """A random allowed place, and whether there is one."""
    score = torch.rand(allowed_BK.shape, device=allowed_BK.device) * allowed_BK
    return score.argmax(1), allowed_BK.sum(1) > 0


def _at(values_BK: Tensor, index: Tensor) -> Tensor:
    return values_BK.gather(1, index[:, None])[:, 0]


def _columns(name: str, characters: Tensor, num: int, blank: int) -> dict[str, Tensor]:
    none = torch.full_like(characters[:, 0], blank)
    columns = [characters[:, k] if k < characters.shape[1] else none for k in range(num)]
    return {f"{name}{k or ''}": column for k, column in enumerate(columns)}
