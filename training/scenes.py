"""Pictures, and the facts about them. B samples, K places for sprites, H x W pixels."""

from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import functional

from training.backdrops import Palette, backdrop
from training.language import SHAPES
from training.sprites import GLYPH_REACH, SHAPE_REACH, Bank, Ink, Pose, draw

MAX_SHAPES = 7
MAX_DIGITS = 3
MAX_LETTERS = 7
BLANK = 26
"""Pads letters, as 10 pads digits."""

GAP = 1.2
Drawn = TypeVar("Drawn", Pose, Ink)


@dataclass(frozen=True)
class Shapes:
    """Shapes on a picture, all (B, K): shape, color, place, size, and whether present."""

    shape: Tensor
    color: Tensor
    rgb: Tensor
    x: Tensor
    y: Tensor
    radius: Tensor
    present: Tensor
    height: int
    width: int


@dataclass(frozen=True)
class Script:
    """Characters in a row (B, K): digits 0..9 or letters 0..25, padded with blanks, and their color (B,). `x` and `y`
    (B, K) are their centers, in pixels."""

    characters: Tensor
    length: Tensor
    color: Tensor
    x: Tensor
    y: Tensor


@dataclass(frozen=True)
class Studio:
    """Draws on one device."""

    bank: Bank
    palette: Palette
    device: torch.device

    def rand(self, *shape: int) -> Tensor:
        return torch.rand(*shape, device=self.device)

    def integers(self, high: int, *shape: int) -> Tensor:
        return torch.randint(0, high, shape, device=self.device)

    def uniform(self, low: float, high: float, *shape: int) -> Tensor:
        return low + (high - low) * self.rand(*shape)

    def shapes(self, batch: int, height: int, width: int, num: Tensor | None = None) -> tuple[Tensor, Shapes]:
        canvas, behind = backdrop(batch, height, width, self.device)
        facts = self.arrange(batch, height, width, behind, num)
        return self.paint(canvas, facts), facts

    def arrange(self, batch: int, height: int, width: int, behind_B3: Tensor, num: Tensor | None = None) -> Shapes:
        """Places one shape in an eighth of the pictures, two to four different ones in almost half, else up to 7."""
        if num is None:
            chance = self.rand(batch)
            few, many = 2 + self.integers(3, batch), 2 + (self.rand(batch).sqrt() * 6).long()
            num = torch.where(chance < 0.12, torch.ones_like(few), torch.where(chance < 0.56, few, many))
            is_mixed = (chance < 0.12) | (chance >= 0.56)
        else:
            is_mixed = self.rand(batch) < 0.5
        shape = torch.where(is_mixed[:, None], self._clustered(batch), self._distinct(batch))
        chosen, shades = self.palette.pick(behind_B3, MAX_SHAPES)
        mine = self._owners(batch)
        color, rgb = chosen.gather(1, mine), shades.gather(1, mine.unsqueeze(-1).expand(-1, -1, 3))
        present = torch.arange(MAX_SHAPES, device=self.device)[None] < num[:, None]
        x, y, radius = self._place(num, height, width)
        return Shapes(shape, color, rgb, x, y, radius, present.float(), height, width)

    def _distinct(self, batch: int) -> Tensor:
        return self.rand(batch, len(SHAPES)).argsort(-1)[:, :MAX_SHAPES]

    def _clustered(self, batch: int) -> Tensor:
        """Shapes mostly of one kind, some of a second, a few of any."""
        kinds = self._distinct(batch)
        return kinds.gather(1, self._owners(batch))

    def _owners(self, batch: int) -> Tensor:
        """Says for each place whose value it copies: the first's, the second's, or its own."""
        share = self.rand(batch, 1) * 1.35
        chance = self.rand(batch, MAX_SHAPES)
        own = torch.arange(MAX_SHAPES, device=self.device).expand(batch, -1)
        second = (self.rand(batch, MAX_SHAPES) < 0.6).long() * torch.ones_like(own)
        other = torch.where(second > 0, torch.ones_like(own), own)
        return torch.where(chance < share, torch.zeros_like(own), other)

    def _place(self, num: Tensor, height: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
        """Draws places where no two shapes touch: for each shape the first of 24 tries that is free, else the best."""
        batch, side = num.shape[0], min(height, width)
        most = torch.where(num == 1, torch.full_like(num, 0.4, dtype=torch.float32), 0.27 - 0.017 * num.float())
        least = (0.075 - 0.005 * num.float()).clamp(min=0.05)
        size = (least + (most - least) * self.rand(batch)) * side
        radius = (size[:, None] * self.uniform(0.75, 1.25, batch, MAX_SHAPES)).clamp(6.0, side / 2 / GAP - 1)
        xs: list[Tensor] = []
        ys: list[Tensor] = []
        for k in range(MAX_SHAPES):
            reach = radius[:, k : k + 1] * 1.15
            x = reach + (width - 2 * reach) * self.rand(batch, 24)
            y = reach + (height - 2 * reach) * self.rand(batch, 24)
            pick = torch.zeros(batch, 1, dtype=torch.long, device=self.device)
            if k:
                apart = torch.hypot(
                    x[:, :, None] - torch.cat(xs, 1)[:, None], y[:, :, None] - torch.cat(ys, 1)[:, None]
                )
                room = (apart - GAP * (radius[:, None, :k] + radius[:, k : k + 1, None])).amin(-1)
                pick = room.clamp(max=0).argmax(-1, keepdim=True)
            xs.append(x.gather(1, pick))
            ys.append(y.gather(1, pick))
        x, y = torch.cat(xs, 1), torch.cat(ys, 1)
        return x, y, radius * self._shrinkage(x, y, radius, num)

    def _shrinkage(self, x: Tensor, y: Tensor, radius: Tensor, num: Tensor) -> Tensor:
        """The factor for all radii that keeps the present shapes apart."""
        apart = torch.hypot(x[:, :, None] - x[:, None], y[:, :, None] - y[:, None])
        ratio = apart / (GAP * (radius[:, :, None] + radius[:, None]))
        places = torch.arange(MAX_SHAPES, device=self.device)
        absent = (places[None, :, None] >= num[:, None, None]) | (places[None, None] >= num[:, None, None])
        ratio = ratio.masked_fill(absent | (places[:, None] == places)[None], 1.0)
        return ratio.amin((1, 2)).clamp(0.3, 1.0)[:, None]

    def paint(self, canvas: Tensor, facts: Shapes, styles: "Styles | None" = None) -> Tensor:
        """Draws shapes onto the canvas, in place. In a tenth of the pictures they have dark outlines."""
        styles = styles or self.style(facts)
        half = facts.radius * SHAPE_REACH
        pose = Pose(facts.x, facts.y, half * styles.stretch, half / styles.stretch, styles.turn)
        ink = Ink(facts.rgb, styles.edge, facts.radius / styles.softness, facts.present)
        count = len(canvas) // 10
        if count:
            wide = _first(count, replace(pose, half_x=pose.half_x + 2.0, half_y=pose.half_y + 2.0))
            dark = _first(count, replace(ink, rgb_BK3=ink.rgb_BK3 * 0.15))
            canvas[:count] = draw(canvas[:count], styles.fields[:count], wide, dark)
        return draw(canvas, styles.fields, pose, ink)

    def style(self, facts: Shapes) -> "Styles":
        """Draws rotation, stretch and softness of each shape; a sixth of those with an interior are only outlines."""
        batch = facts.shape.shape[0]
        turn = self.bank.turns_N[facts.shape] * self.uniform(-1, 1, batch, MAX_SHAPES)
        is_long = facts.shape >= SHAPES.index("rectangle")
        is_triangle = facts.shape == SHAPES.index("triangle")
        turn = turn + is_long * (self.rand(batch, MAX_SHAPES) < 0.35) * 1.5708
        turn = turn + is_triangle * (self.rand(batch, MAX_SHAPES) < 0.15) * 3.1416
        stretch = self.uniform(-0.08, 0.08, batch, MAX_SHAPES).exp()
        softness = self.uniform(0.3, 1.6, batch, 1)
        is_round = (facts.shape == SHAPES.index("circle")) | (facts.shape == SHAPES.index("ring"))
        hollow = (self.rand(batch, 1) < 0.16) & ~is_round & (facts.radius > 11)
        wall = (1.2 / facts.radius + self.uniform(0.02, 0.1, batch, 1))[:, :, None, None]
        fields = self.bank.shapes_NSS[facts.shape]
        fields = torch.where(hollow[:, :, None, None], wall - (fields - wall).abs(), fields)
        edge = (facts.shape == SHAPES.index("ring")) * self.uniform(-0.06, 0.15, batch, 1)
        return Styles(fields, turn, stretch, softness, edge)

    def digits(self, batch: int, height: int, width: int) -> tuple[Tensor, Script]:
        """Draws one to three handwritten digits in a row, in many kinds of strokes."""
        canvas, behind = backdrop(batch, height, width, self.device)
        chance = self.rand(batch)
        num = 1 + (chance > 0.7).long() + (chance > 0.86).long()
        index = self.integers(len(self.bank.labels_N), batch, MAX_DIGITS)
        color, rgb = self.palette.pick(behind, 1)
        side = self._digit_side(num, height, width)
        step = side * self.uniform(0.62, 0.85, batch)
        room_x = width - (num - 1) * step - side * 0.75
        x = side * 0.375 + room_x.clamp(min=0) * self.rand(batch) + room_x.clamp(max=0) / 2
        y = side * 0.4 + (height - side * 0.8) * self.rand(batch)
        place = torch.arange(MAX_DIGITS, device=self.device)
        strokes = [self._strokes(index[:, k]) for k in range(MAX_DIGITS)]
        fields, edge, gain = (torch.stack(parts, 1) for parts in zip(*strokes, strict=True))
        stretch = self.uniform(-0.18, 0.18, batch, MAX_DIGITS).exp()
        pose = Pose(
            x[:, None] + place * step[:, None],
            y[:, None] + side[:, None] * self.uniform(-0.04, 0.04, batch, MAX_DIGITS),
            side[:, None] * (15 / 28) * stretch,
            side[:, None] * (15 / 28) / stretch,
            self.uniform(-0.2, 0.2, batch, 1).expand(-1, MAX_DIGITS),
            self.uniform(-0.28, 0.28, batch, 1).expand(-1, MAX_DIGITS),
        )
        shown = (~_beyond(num, MAX_DIGITS)).float()
        canvas = draw(canvas, fields, pose, Ink(rgb.expand(-1, MAX_DIGITS, -1), edge, gain, shown))
        labels = self.bank.labels_N[index].masked_fill(_beyond(num, MAX_DIGITS), 10)
        return canvas, Script(labels, num, color[:, 0], pose.x, pose.y)

    def _digit_side(self, num: Tensor, height: int, width: int) -> Tensor:
        """The side of a digit's square: from a third of the picture to all of it, if that many digits fit."""
        alone = self.uniform(0.34, 1.12, num.shape[0]) * min(height, width)
        fit = (width / (0.45 + 0.68 * num)).clamp(max=height * 1.1)
        row = fit * self.uniform(0.35, 1.0, num.shape[0]).sqrt()
        return torch.where(num == 1, alone, row).clamp(min=24.0)

    def _strokes(self, index: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Makes fields of digits: unchanged, coarse (7 to 12 cells a side, smooth or square, most of them fitted to
        their frame), thick, or thin. A fifth are printed, because some printed forms are rarely handwritten."""
        written = self.bank.digits_NSS[index].float() / 15
        n = len(written)
        raw = torch.where((self.rand(n) < 0.2)[:, None, None], self._printed(self.bank.labels_N[index]), written)
        start, part = n // 3, n // 12
        pieces = [raw[:start]]
        for i, cells in enumerate((8, 8, 8, 12, 7, 9)):
            inner = raw[start + i * part : start + (i + 1) * part]
            inner = inner[:, 3:25, 3:25] if i in (1, 3) else _fitted(inner, self.uniform(0.9, 1.4, len(inner)))
            pieces.append(_coarse(inner, cells, smooth=i != 1))
        rest = raw[start + 6 * part :]
        middle = len(rest) // 2
        thick = functional.max_pool2d(rest[:middle, None], 2, 1, 1)[:, 0, :28, :28]
        thin = -functional.max_pool2d(-rest[middle:, None], 2, 1, 1)[:, 0, :28, :28] * 0.7 + rest[middle:] * 0.5
        # Values at the border of a field extend without end, so the border must be empty.
        fields = functional.pad(torch.cat([*pieces, thick, thin]), (1, 1, 1, 1))
        is_crisp = self.rand(n) < 0.4
        gain = 1 + is_crisp * self.uniform(1, 5, n)
        edge = 0.5 + is_crisp * self.uniform(-0.2, 0.1, n)
        return fields, edge, gain

    def _printed(self, labels: Tensor) -> Tensor:
        """Digits of any font, with the margins and softness of handwritten ones."""
        font = self.integers(len(self.bank.glyphs_FGSS), len(labels))
        tiles = self.bank.glyphs_FGSS[font, 52 + labels][:, 11:51, 12:52].float()
        solid = (0.5 + tiles * 20).clamp(0, 1)
        return functional.interpolate(solid[:, None], size=(28, 28), mode="bilinear", antialias=True)[:, 0]

    def script(self, batch: int, height: int, width: int) -> tuple[Tensor, Script, Tensor]:
        """Draws a printed word of one to seven letters, or a number of one to four digits (True in the last tensor)."""
        canvas, behind = backdrop(batch, height, width, self.device)
        font = self.integers(len(self.bank.glyphs_FGSS), batch)
        letters, length = self._spelling(batch)
        is_number = self.rand(batch) < 0.16
        digits = self.integers(10, batch, MAX_LETTERS)
        num_digits = 1 + self.integers(4, batch)
        length = torch.where(is_number, num_digits, length)
        case = self._case(batch)
        glyph = torch.where(is_number[:, None], 52 + digits, letters.clamp(max=25) + 26 * case)
        color, rgb = self.palette.pick(behind, 1)
        canvas, pose = self._write(canvas, font, glyph, length, rgb[:, 0])
        spelled = torch.where(is_number[:, None], digits, letters)
        blank = torch.where(is_number, torch.full_like(length, 10), torch.full_like(length, BLANK))[:, None]
        spelled = torch.where(_beyond(length, MAX_LETTERS), blank.expand_as(spelled), spelled)
        return canvas, Script(spelled, length, color[:, 0], pose.x, pose.y), is_number

    def _spelling(self, batch: int) -> tuple[Tensor, Tensor]:
        """Half are words, half are random letters."""
        words = self.bank.words_N7[self.integers(len(self.bank.words_N7), batch)]
        lengths = (words < BLANK).sum(-1)
        random_lengths = (1 + self.integers(7, batch) - (self.rand(batch) < 0.3).long()).clamp(min=1)
        is_word = self.rand(batch) < 0.5
        letters = torch.where(is_word[:, None], words, self.integers(26, batch, MAX_LETTERS))
        return letters, torch.where(is_word, lengths, random_lengths)

    def _case(self, batch: int) -> Tensor:
        """(B, K), 1 for lower case: all capitals, all lower case, or one capital first."""
        chance = self.rand(batch, 1)
        places = torch.arange(MAX_LETTERS, device=self.device)[None]
        return ((chance > 0.45) & ((chance < 0.82) | (places > 0))).long()

    def _write(self, canvas: Tensor, font: Tensor, glyph: Tensor, length: Tensor, rgb: Tensor) -> tuple[Tensor, Pose]:
        batch, _, height, width = canvas.shape
        shown = ~_beyond(length, MAX_LETTERS)
        advance = (self.bank.advances_FG[font[:, None], glyph] + self.uniform(-0.01, 0.1, batch, 1)) * shown
        total = advance.sum(-1)
        largest = torch.minimum(width * 0.96 / total.clamp(min=0.3), torch.full_like(total, height * 0.95))
        least = torch.full_like(total, 15.0).minimum(largest)
        em = least + (largest - least) * self.rand(batch).pow(0.7)
        start = (width - em * total) * self.rand(batch)
        pen = start[:, None] + em[:, None] * (advance.cumsum(-1) - advance)
        middle = em * 0.5 + (height - em).clamp(min=0) * self.rand(batch)
        tilt = self.uniform(-0.12, 0.12, batch) * (self.rand(batch) < 0.6) * (em * 4 / height).clamp(max=1)
        slant = self.uniform(-0.3, 0.15, batch) * (self.rand(batch) < 0.3)
        softness, weight = self.uniform(0.35, 1.4, batch), self.uniform(-0.016, 0.012, batch)
        centre = (start + em * total / 2)[:, None]
        x = pen + em[:, None] * (advance / 2) - centre
        reach = (em * GLYPH_REACH)[:, None].expand_as(x)
        turn = tilt[:, None].expand_as(x)
        pose = Pose(
            centre + x * turn.cos(), middle[:, None] + x * turn.sin(), reach, reach, turn, slant[:, None].expand_as(x)
        )
        ink = Ink(
            rgb[:, None].expand(-1, MAX_LETTERS, -1),
            weight[:, None].expand_as(x),
            (em / softness)[:, None].expand_as(x),
            shown.float(),
        )
        return draw(canvas, self.bank.glyphs_FGSS[font[:, None], glyph].float(), pose, ink), pose

    def video(self, batch: int, height: int, width: int) -> tuple[Tensor, Shapes, Tensor, Tensor]:
        """Draws (B, 2, 3, H, W) frames of shapes, the first of which moves (ways 0..3) or changes its size (4, 5)."""
        canvas, behind = backdrop(batch, height, width, self.device)
        facts = self.arrange(batch, height, width, behind, 1 + (self.rand(batch) < 0.2).long())
        facts = replace(facts, radius=facts.radius.clamp(max=min(height, width) * 0.22))
        way = self.integers(6, batch)
        sign = torch.where(way % 2 == 0, torch.full_like(facts.x[:, 0], -1.0), torch.ones_like(facts.x[:, 0]))
        is_x, is_y, grows = (way < 2).float(), ((way == 2) | (way == 3)).float(), (way > 3).float()
        reach = facts.radius[:, 0] * 1.15
        share = self.uniform(0.3, 1.0, batch)
        span_x, span_y = (width - 2 * reach) * share, (height - 2 * reach) * share
        wobble = facts.radius[:, 0] * self.uniform(-0.1, 0.1, batch)
        half_x, half_y = is_x * span_x / 2, is_y * span_y / 2
        x = facts.x[:, 0].maximum(reach + half_x).minimum(width - reach - half_x)
        y = facts.y[:, 0].maximum(reach + half_y).minimum(height - reach - half_y)
        ratio = self.uniform(1.25, 1.7, batch)
        small = facts.radius[:, 0] * (1 - grows) + grows * facts.radius[:, 0] / ratio
        before, after = (
            replace(
                facts,
                x=torch.cat([(x + side * sign * half_x + is_y * side * wobble)[:, None], facts.x[:, 1:]], 1),
                y=torch.cat([(y + side * sign * half_y + is_x * side * wobble)[:, None], facts.y[:, 1:]], 1),
                radius=torch.cat([self._sized(facts, small, way, side)[:, None], facts.radius[:, 1:]], 1),
            )
            for side in (-1, 1)
        )
        styles = self.style(before)
        frames = torch.stack([self.paint(canvas.clone(), side, styles) for side in (before, after)], 1)
        return frames, before, way.clamp(max=3), (way - 4).clamp(min=-1)

    def _sized(self, facts: Shapes, small: Tensor, way: Tensor, side: int) -> Tensor:
        """The radius of the first shape before (-1) and after (1): way 4 grows, way 5 shrinks."""
        is_small = (way == 4) if side < 0 else (way == 5)
        return torch.where(is_small, small, facts.radius[:, 0])


@dataclass(frozen=True)
class Styles:
    """How shapes are drawn: fields (B, K, S, S), the others (B, K) or (B, 1)."""

    fields: Tensor
    turn: Tensor
    stretch: Tensor
    softness: Tensor
    edge: Tensor


def _first(count: int, item: Drawn) -> Drawn:
    values: dict[str, Any] = {name: None if value is None else value[:count] for name, value in vars(item).items()}
    return replace(item, **values)


def _fitted(fields: Tensor, wide: Tensor) -> Tensor:
    """Centers strokes in a frame of their height that is `wide` times as wide."""
    solid, ticks = fields > 0.3, torch.arange(fields.shape[-1], device=fields.device)

    def ends(filled: Tensor) -> tuple[Tensor, Tensor]:
        size = filled.shape[1]
        return ticks.where(filled, size).amin(1) * 2 / size - 1, (ticks + 1).where(filled, 0).amax(1) * 2 / size - 1

    (top, bottom), (left, right) = ends(solid.any(2)), ends(solid.any(1))
    half = ((bottom - top) / 2).clamp(min=0.25)
    none = torch.zeros_like(half)
    across = torch.stack([half * wide, none, (left + right) / 2], -1)
    down = torch.stack([none, half, (top + bottom) / 2], -1)
    if not len(fields):
        return fields
    grid = functional.affine_grid(torch.stack([across, down], 1), [len(fields), 1, 32, 32], align_corners=False)
    return functional.grid_sample(fields.unsqueeze(1), grid, align_corners=False).squeeze(1)


def _coarse(inner: Tensor, cells: int, *, smooth: bool) -> Tensor:
    """Strokes as a scanner with few cells sees them."""
    small = (functional.adaptive_avg_pool2d(inner.unsqueeze(1), (cells, cells)) * 1.5).clamp(0, 1)
    if not smooth:
        return functional.interpolate(small, size=(28, 28), mode="nearest").squeeze(1)
    return functional.interpolate(small, size=(28, 28), mode="bicubic", align_corners=False).squeeze(1).clamp(0, 1)


def _beyond(length: Tensor, places: int) -> Tensor:
    return torch.arange(places, device=length.device)[None] >= length[:, None]
