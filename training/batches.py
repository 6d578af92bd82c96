"""Batches of scenes with conversations: which pictures, which sizes, how many of each."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from training.backdrops import photograph
from training.dialogue import Book, Sheet, Turn
from training.model import FACTOR, Batch, Layout, Shape, make_layout, place_images
from training.questions import (
    ask_digit_pair,
    ask_digits,
    ask_nothing,
    ask_pair,
    ask_script,
    ask_shapes,
    ask_video,
)
from training.scenes import Shapes, Studio

GRIDS = (
    *((4, 4), (5, 5), (6, 6), (7, 7), (7, 7), (4, 6), (6, 4), (4, 8), (8, 4), (5, 7), (7, 5), (6, 8), (8, 6), (5, 9)),
    *((9, 5), (3, 8), (3, 6), (3, 12), (4, 12), (4, 10), (8, 3), (2, 8), (2, 12), (3, 10), (2, 10), (5, 8), (8, 5)),
    *((6, 7), (5, 6), (4, 5), (3, 14), (3, 16), (2, 16), (3, 7), (4, 7), (12, 4)),
)
"""Rows and columns of 32 pixels; what is here twice comes twice as often."""

SMALL_GRIDS = ((4, 4), (4, 6), (6, 4), (5, 5), (7, 7), (6, 8), (8, 6), (5, 9))
TEXT_TOKENS, ANSWER_TOKENS = 68, 24
ONE_TURN_TOKENS = 52
CHAT_TOKENS, CHAT_ANSWER_TOKENS = 96, 56


@dataclass(frozen=True)
class Recipe:
    """Makes batches on one device."""

    studio: Studio
    book: Book
    shape: Shape
    num_words: int
    dtype: torch.dtype
    layouts: dict[tuple[int, int], Layout] = field(default_factory=dict)
    flags: dict[tuple[bool, ...], Tensor] = field(default_factory=dict)

    def layout(self, grid: tuple[int, int]) -> Layout:
        if grid not in self.layouts:
            self.layouts[grid] = make_layout(*grid, self.shape, self.studio.device, self.dtype)
        return self.layouts[grid]

    def pictures(self, grid: tuple[int, int], batch: int) -> Batch:
        """One picture and two questions about it. Wide pictures hold more words."""
        height, width = grid[0] * FACTOR, grid[1] * FACTOR
        share = 0.42 if width >= 2.5 * height else 0.3
        num_script = int(batch * share)
        num_digits = int(batch * (0.2 if share < 0.4 else 0.14))
        num_shapes = batch - num_script - num_digits
        shapes, facts = self.studio.shapes(num_shapes, height, width)
        digits, handwriting = self.studio.digits(num_digits, height, width)
        script, print_, is_number = self.studio.script(num_script, height, width)
        patches = torch.cat([self._photos(part) for part in (shapes, digits, script)])
        turns: list[tuple[Turn, Turn, Turn]] = []
        for _ in range(2):
            before = turns[-1] if turns else (None, None, None)
            turns.append(
                (
                    ask_shapes(facts, self.num_words, before[0]),
                    ask_digits(handwriting, self.num_words, before[1]),
                    ask_script(print_, is_number, self.num_words, before[2]),
                )
            )
        return self._batch(patches[:, None], grid, [_join(*parts) for parts in turns], self.book.image)

    def pairs(self, grid: tuple[int, int], batch: int) -> Batch:
        """Two pictures, one question."""
        height, width = grid[0] * FACTOR, grid[1] * FACTOR
        num_digits = max(1, batch // 5)
        num_shapes = batch - num_digits
        first, second, facts, others = self._two_scenes(num_shapes, height, width)
        digits = [self.studio.digits(num_digits, height, width) for _ in range(2)]
        patches = torch.stack(
            [
                torch.cat([self._photos(first), self._photos(digits[0][0])]),
                torch.cat([self._photos(second), self._photos(digits[1][0])]),
            ],
            1,
        )
        turn = _join(ask_pair(facts, others), ask_digit_pair(digits[0][1], digits[1][1]))
        return self._batch(patches, grid, [turn], self.book.image)

    def _two_scenes(self, batch: int, height: int, width: int) -> tuple[Tensor, Tensor, Shapes, Shapes]:
        """Half of them show one shape each, and then often the same shape or the same colour."""
        studio = self.studio
        single = studio.rand(batch) < 0.5
        counts = [torch.where(single, torch.ones_like(single.long()), 1 + studio.integers(6, batch)) for _ in range(2)]
        first, facts = studio.shapes(batch, height, width, counts[0])
        canvas, others = studio.shapes(batch, height, width, counts[1])
        copied = (studio.rand(batch, 1) < 0.45) & single[:, None]
        kept = torch.arange(others.shape.shape[1], device=studio.device)[None] > 0
        shape = torch.where(copied & ~kept, facts.shape, others.shape)
        same_color = (studio.rand(batch, 1) < 0.45) & single[:, None] & ~kept
        color = torch.where(same_color, facts.color, others.color)
        rgb = torch.where(same_color[..., None], studio.palette.mix(color), others.rgb)
        # Where a copied colour would not stand out, the background is its opposite.
        opposite = 1 - rgb[:, 0].mean(-1, keepdim=True).round().expand(-1, 3)
        plain = opposite[:, :, None, None].expand_as(canvas).contiguous()
        changed = Shapes(
            shape, color, rgb, others.x, others.y, others.radius, others.present, others.height, others.width
        )
        repainted = (copied | same_color[:, :1])[:, :, None, None]
        second = torch.where(repainted, studio.paint(plain, changed), canvas)
        return first, second, facts, changed

    def videos(self, grid: tuple[int, int], batch: int) -> Batch:
        """Two frames, one question."""
        height, width = grid[0] * FACTOR, grid[1] * FACTOR
        frames, facts, way, growth = self.studio.video(batch, height, width)
        patches = self._photos(frames.transpose(0, 1).flatten(0, 1)).unflatten(0, (2, batch)).unflatten(-1, (3, 256))
        both = patches.permute(1, 2, 3, 0, 4).flatten(2)  # a patch of a video is channel, frame, y, x
        return self._batch(both[:, None], grid, [ask_video(facts, way, growth)], self.book.video)

    def texts(self, grid: tuple[int, int], batch: int) -> Batch:
        """No picture, two questions; `grid` is not used."""
        first = ask_nothing(batch, self.num_words, self.studio.device)
        turns = [first, ask_nothing(batch, self.num_words, self.studio.device, first)]
        sheet = self._sheet(turns, None, 0)
        token = torch.arange(sheet.ids.shape[1], device=sheet.ids.device).expand(3, batch, -1)
        return Batch(None, None, sheet.ids, token, token[0, :, :0], sheet.rows, sheet.targets, _kinds(turns))

    def _photos(self, canvas: Tensor) -> Tensor:
        return photograph(canvas, random.uniform(0.3, 0.8), self.dtype)

    def _batch(self, patches_BIPC: Tensor, grid: tuple[int, int], turns: Sequence[Turn], marker: int) -> Batch:
        layout, images = self.layout(grid), patches_BIPC.shape[1]
        sheet = self._sheet(turns, [marker] * images, layout.units)
        positions, places = place_images(sheet.starts[:, :images], sheet.ids.shape[1], *grid)
        return Batch(patches_BIPC, layout, sheet.ids, positions, places, sheet.rows, sheet.targets, _kinds(turns))

    def _sheet(self, turns: Sequence[Turn], markers: Sequence[int] | None, units: int) -> Sheet:
        """A conversation: perhaps a system message, then the turns; in a sixth the image comes after the question."""
        book, batch = self.book, len(turns[0].kind)
        chance = torch.rand(batch, device=self.studio.device)
        system = book.opening[((chance < 0.05) * (1 + chance * 60)).long().clamp(max=len(book.opening) - 1)]
        parts, asked = [system[:, None]], [False]

        def add(fragments: Tensor | int, is_answer: bool = False) -> None:
            block = book.constant(batch, fragments) if isinstance(fragments, int) else fragments
            parts.append(block)
            asked.extend([is_answer] * block.shape[1])

        for number, turn in enumerate(turns):
            question = book.question(turn)
            add(book.user)
            if number == 0 and markers:
                late = (torch.rand(batch, 1, device=self.studio.device) < 0.16) & (markers[0] == book.image)
                add(question.masked_fill(~late, book.blank))
                for marker in markers:
                    self._add_image(add, marker, batch)
                question = question.masked_fill(late, book.blank)
            add(question)
            add(book.assistant)
            add(book.answer(turn), True)
            add(book.end, True)
            add(book.newline)
        is_answer = self._flags(tuple(asked)).expand(batch, -1)
        num_tokens, num_answers = CHAT_TOKENS, CHAT_ANSWER_TOKENS
        if markers:
            budget = TEXT_TOKENS if len(turns) > 1 else ONE_TURN_TOKENS
            num_tokens, num_answers = len(markers) * (units + 2) + budget, ANSWER_TOKENS
        return book.compose(torch.cat(parts, 1), is_answer, units=units, num_tokens=num_tokens, num_answers=num_answers)

    def _flags(self, values: tuple[bool, ...]) -> Tensor:
        """On the device, made once: a copy from the host would wait for all that the device has to do."""
        if values not in self.flags:
            self.flags[values] = torch.tensor(values, device=self.studio.device)
        return self.flags[values]

    def _add_image(self, add: Callable[[Tensor | int], None], marker: int, batch: int) -> None:
        if marker == self.book.video:
            add(self.book.times[torch.randint(0, len(self.book.times), (batch,), device=self.studio.device)][:, None])
        for fragment in (self.book.vision[0], marker, self.book.vision[1]):
            add(fragment)


def _join(*turns: Turn) -> Turn:
    return Turn(
        torch.cat([turn.kind for turn in turns]),
        torch.cat([turn.reply for turn in turns]),
        torch.cat([turn.values for turn in turns]),
    )


def _kinds(turns: Sequence[Turn]) -> Tensor:
    return torch.stack([turn.kind for turn in turns], 1)
