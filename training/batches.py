"""Batches of scenes with conversations: which pictures, in which sizes, and how many of each."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from training.backdrops import backdrop, photograph
from training.dialogue import Book, Sheet, Turn
from training.language import SHAPES
from training.marks import FIRST_DIGIT, FIRST_LETTER, NOTHING, Marks, beside, join, mark, mark_ground, mark_nothing
from training.model import FACTOR, Batch, Layout, Shape, make_layout, place_images
from training.other_questions import ask_digit_pair, ask_nothing, ask_pair, ask_strange, ask_video
from training.questions import ask_digits, ask_script, ask_shapes
from training.scenes import Script, Shapes, Studio
from training.strange import strange


class Mix(NamedTuple):
    """How frequent a grid is, and the shares of its pictures with print and handwriting; the others show shapes."""

    often: int
    script: float
    digits: float


GRIDS: Mapping[tuple[int, int], Mix] = {
    (6, 6): Mix(10, 0.08, 0.48),
    (7, 7): Mix(6, 0.08, 0.08),
    (6, 8): Mix(5, 0.1, 0.06),
    (8, 6): Mix(3, 0.1, 0.06),
    (6, 7): Mix(3, 0.3, 0.06),
    (7, 6): Mix(2, 0.15, 0.06),
    (5, 9): Mix(5, 0.4, 0.06),
    (9, 5): Mix(1, 0.1, 0.05),
    (5, 8): Mix(3, 0.5, 0.06),
    (8, 5): Mix(1, 0.15, 0.05),
    (4, 9): Mix(2, 0.75, 0.05),
    (4, 10): Mix(5, 0.8, 0.05),
    (10, 4): Mix(1, 0.1, 0.05),
    (4, 11): Mix(4, 0.8, 0.05),
    (4, 12): Mix(2, 0.8, 0.05),
    (3, 12): Mix(1, 0.85, 0.05),
    (3, 13): Mix(2, 0.85, 0.05),
    (3, 14): Mix(1, 0.85, 0.05),
    (4, 4): Mix(1, 0.1, 0.4),
    (5, 5): Mix(1, 0.1, 0.2),
    (4, 8): Mix(1, 0.5, 0.05),
    (8, 4): Mix(1, 0.1, 0.05),
}
"""Rows and columns of 32 pixels. Most are sizes in which pictures are served, given ENLARGED_UNITS and MAX_UNITS of
checkpoint.py: scans become (6, 6), wide grids hold words, drawings and photos become the others. The last four are for
servers that do not enlarge pictures."""


def order(least_units: int = 0, least_often: int = 0) -> tuple[tuple[int, int], ...]:
    """The grids to draw from, each as often as its frequency, if they have at least this many squares and frequency."""
    grids = {grid: mix.often for grid, mix in GRIDS.items() if grid[0] * grid[1] >= least_units}
    return tuple(grid for grid, often in grids.items() if often >= least_often for _ in range(often))


PAIR_GRIDS = ((6, 6), (6, 6), (7, 7), (6, 8), (8, 6), (5, 9), (4, 4))
VIDEO_GRIDS = ((4, 4), (5, 5), (7, 7), (6, 8), (5, 9))
"""Frames of a video are served smaller than pictures."""


class Room(NamedTuple):
    """The limits of a conversation: turns, tokens without images, and answer tokens. Longer conversations, fewer than
    one in a thousand, are cut off."""

    turns: int
    tokens: int
    answers: int

    def shortened(self, turns: int) -> "Room":
        """The same room per turn, for at most `turns` turns."""
        if turns >= self.turns:
            return self
        return Room(turns, self.tokens * turns // self.turns, self.answers * turns // self.turns)


SHAPES_ROOM = Room(4, 118, 34)
WORDS_ROOM = Room(2, 72, 20)
SIDE_ROOM = Room(2, 68, 16)
CHAT_ROOM = Room(2, 92, 44)


@dataclass(frozen=True, kw_only=True)
class Emphasis:
    """What to ask more often than usual: counts `counting` times as often, questions with two parts and descriptions
    `longer` times as often. `strange` is the share of pictures that show nothing the model knows, `turns` the largest
    number of questions about a picture."""

    counting: float = 1.0
    longer: float = 1.0
    strange: float = 0.08
    turns: int = SHAPES_ROOM.turns


@dataclass(frozen=True)
class Recipe:
    """Makes batches on one device."""

    studio: Studio
    book: Book
    shape: Shape
    num_words: int
    dtype: torch.dtype
    emphasis: Emphasis = field(default_factory=Emphasis)
    layouts: dict[tuple[int, int], Layout] = field(default_factory=dict)
    flags: dict[tuple[bool, ...], Tensor] = field(default_factory=dict)

    def layout(self, grid: tuple[int, int]) -> Layout:
        if grid not in self.layouts:
            self.layouts[grid] = make_layout(*grid, self.shape, self.studio.device, self.dtype)
        return self.layouts[grid]

    def pictures(self, grid: tuple[int, int], batch: int) -> Batch:
        """One picture and up to four questions about it, or two if most are words, which leave little to ask."""
        height, width = grid[0] * FACTOR, grid[1] * FACTOR
        mix = GRIDS.get(grid, Mix(1, 0.3, 0.2))
        emphasis = self.emphasis
        room = (SHAPES_ROOM if mix.script < 0.5 else WORDS_ROOM).shortened(emphasis.turns)
        num_script, num_digits = max(1, int(batch * mix.script)), max(1, int(batch * mix.digits))
        num_strange = max(0, min(max(1, int(batch * emphasis.strange)), batch - num_script - num_digits - 1))
        shapes, facts = self.studio.shapes(batch - num_script - num_digits - num_strange, height, width)
        digits, handwriting = self.studio.digits(num_digits, height, width)
        script, print_, is_number = self.studio.script(num_script, height, width)
        others = strange(num_strange, height, width, self.studio.bank.glyphs_FGSS)
        patches = torch.cat([self._photos(part) for part in (shapes, digits, script, others)])
        parts = (
            ask_shapes(facts, self.num_words, room.turns, counting=emphasis.counting, longer=emphasis.longer),
            ask_digits(handwriting, self.num_words, room.turns, longer=emphasis.longer),
            ask_script(print_, is_number, self.num_words, room.turns, longer=emphasis.longer),
            ask_strange(num_strange, self.num_words, self.studio.device, room.turns),
        )
        turns = [_join(*turn) for turn in zip(*parts, strict=True)]
        size = (height, width)
        things = mark(facts.shape.masked_fill(facts.present == 0, NOTHING), facts.color, facts.x, facts.y, size)
        reach = facts.radius - 1e6 * (1 - facts.present)
        marks = join(
            beside(things, mark_ground(facts.x, facts.y, reach, size)),
            _mark_script(handwriting, torch.ones_like(handwriting.length, dtype=torch.bool), size),
            _mark_script(print_, is_number, size),
            mark_nothing(num_strange, self.studio.device),
        )
        return self._batch(patches[:, None], grid, turns, self.book.image, room, marks)

    def pairs(self, grid: tuple[int, int], batch: int) -> Batch:
        """Two pictures, up to two questions."""
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
        parts = (
            ask_pair(facts, others, self.num_words, SIDE_ROOM.turns),
            ask_digit_pair(digits[0][1], digits[1][1], self.num_words, SIDE_ROOM.turns),
        )
        turns = [_join(*turn) for turn in zip(*parts, strict=True)]
        return self._batch(patches, grid, turns, self.book.image, SIDE_ROOM)

    def _two_scenes(self, batch: int, height: int, width: int) -> tuple[Tensor, Tensor, Shapes, Shapes]:
        """Some pairs show one thing each, often of the same shape or color. Others show several things, often most of
        one shape in both, so that it takes counting to say which has more."""
        studio = self.studio
        single, is_alike = studio.rand(batch) < 0.4, studio.rand(batch, 1) < 0.6
        common, is_plain = studio.integers(len(SHAPES), batch, 1), studio.rand(batch, 1) < 0.6
        made = []
        for _ in range(2):
            canvas, behind = backdrop(batch, height, width, studio.device)
            num = torch.where(single, torch.ones_like(single.long()), 1 + studio.integers(6, batch))
            facts = studio.arrange(batch, height, width, behind, num)
            taken = is_alike & ~single[:, None] & (is_plain | (studio.rand(*facts.shape.shape) < 0.75))
            facts = replace(facts, shape=torch.where(taken, common, facts.shape))
            made.append((studio.paint(canvas, facts), facts))
        (first, facts), (canvas, others) = made
        changed, repainted = self._echo(facts, others, single)
        # A copied color might not stand out, so its background becomes black or white.
        opposite = 1 - changed.rgb[:, 0].mean(-1, keepdim=True).round().expand(-1, 3)
        plain = opposite[:, :, None, None].expand_as(canvas).contiguous()
        second = torch.where(repainted[:, :, None, None], studio.paint(plain, changed), canvas)
        return first, second, facts, changed

    def _echo(self, facts: Shapes, others: Shapes, single: Tensor) -> tuple[Shapes, Tensor]:
        """Gives some single things of the second scene the shape or color of the first; also says which changed."""
        studio = self.studio
        is_first = torch.arange(others.shape.shape[1], device=studio.device)[None] == 0
        copied, same_color = ((studio.rand(single.shape[0], 1) < 0.45) & single[:, None] for _ in range(2))
        color = torch.where(same_color & is_first, facts.color, others.color)
        rgb = torch.where((same_color & is_first)[..., None], studio.palette.mix(color), others.rgb)
        shape = torch.where(copied & is_first, facts.shape, others.shape)
        return replace(others, shape=shape, color=color, rgb=rgb), copied | same_color

    def videos(self, grid: tuple[int, int], batch: int) -> Batch:
        """Two frames, up to two questions."""
        height, width = grid[0] * FACTOR, grid[1] * FACTOR
        frames, facts, way, growth = self.studio.video(batch, height, width)
        patches = self._photos(frames.transpose(0, 1).flatten(0, 1)).unflatten(0, (2, batch)).unflatten(-1, (3, 256))
        both = patches.permute(1, 2, 3, 0, 4).flatten(2)  # a patch of a video is channel, frame, y, x
        turns = ask_video(facts, way, growth, self.num_words, SIDE_ROOM.turns)
        return self._batch(both[:, None], grid, turns, self.book.video, SIDE_ROOM)

    def texts(self, grid: tuple[int, int], batch: int) -> Batch:
        """No picture, two questions; `grid` is not used."""
        turns = ask_nothing(batch, self.num_words, self.studio.device, CHAT_ROOM.turns)
        sheet = self._sheet(turns, None, 0, CHAT_ROOM)
        token = torch.arange(sheet.ids.shape[1], device=sheet.ids.device).expand(3, batch, -1)
        return Batch(None, None, sheet.ids, token, token[0, :, :0], sheet.rows, sheet.targets, _kinds(turns))

    def _photos(self, canvas: Tensor) -> Tensor:
        return photograph(canvas, random.uniform(0.3, 0.8), self.dtype)

    def _batch(
        self,
        patches_BIPC: Tensor,
        grid: tuple[int, int],
        turns: Sequence[Turn],
        marker: int,
        room: Room,
        marks: Marks | None = None,
    ) -> Batch:
        layout, images = self.layout(grid), patches_BIPC.shape[1]
        sheet = self._sheet(turns, [marker] * images, layout.units, room)
        positions, places = place_images(sheet.starts[:, :images], sheet.ids.shape[1], *grid)
        return Batch(
            patches_BIPC, layout, sheet.ids, positions, places, sheet.rows, sheet.targets, _kinds(turns), marks
        )

    def _sheet(self, turns: Sequence[Turn], markers: Sequence[int] | None, units: int, room: Room) -> Sheet:
        """Composes conversations: some with a system message, then the turns. In one of six the image comes after the
        question."""
        book, batch = self.book, len(turns[0].kind)
        chance = torch.rand(batch, device=self.studio.device)
        system = book.opening[((chance < 0.05) * (1 + chance * 60)).long().clamp(max=len(book.opening) - 1)]
        parts, asked = [system[:, None]], [False]

        def add(fragments: Tensor | int, is_answer: bool = False) -> None:
            block = book.constant(batch, fragments) if isinstance(fragments, int) else fragments
            parts.append(block)
            asked.extend([is_answer] * block.shape[1])

        for number, turn in enumerate(turns):
            first = len(parts)
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
            if number:
                parts[first:] = [torch.cat(parts[first:], 1).masked_fill(~turn.given[:, None], book.blank)]
        is_answer = self._flags(tuple(asked)).expand(batch, -1)
        num_tokens = room.tokens + len(markers or ()) * (units + 2)
        return book.compose(
            torch.cat(parts, 1), is_answer, units=units, num_tokens=num_tokens, num_answers=room.answers
        )

    def _flags(self, values: tuple[bool, ...]) -> Tensor:
        """Caches flags on the device, because a copy from the host would wait for all queued work."""
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
        torch.cat([turn.given for turn in turns]),
    )


def _mark_script(script: Script, is_number: Tensor, size: tuple[int, int]) -> Marks:
    first = torch.where(is_number, FIRST_DIGIT, FIRST_LETTER)[:, None]
    place = torch.arange(script.characters.shape[1], device=first.device)
    names = (script.characters + first).masked_fill(place >= script.length[:, None], NOTHING)
    return mark(names, script.color[:, None].expand_as(names), script.x, script.y, size)


def _kinds(turns: Sequence[Turn]) -> Tensor:
    return torch.stack([turn.kind for turn in turns], 1)
