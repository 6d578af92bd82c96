"""Conversations as token ids, joined on the device from fragments that were tokenized once.

The tokenizer splits text into words before it merges, so the ids of a text are those of its words, and fragments can be
joined wherever a word starts. B samples, S parts of a conversation, L tokens, A answer tokens.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer
from torch import Tensor

from training.language import ANSWERS, HINTS, QUESTIONS, SLOTS, SYSTEM, wordings

KINDS = tuple(QUESTIONS)
REPLIES = tuple(ANSWERS)
VALUES = (
    *("shape", "shape1", "shape2", "color", "color1", "color2", "relation", "number", "number1", "number2"),
    *("yes", "side", "edge", "way", "size", "which", "digit", "digit1", "digit2", "digit3"),
    *("letter", "letter1", "letter2", "letter3", "letter4", "letter5", "letter6", "word"),
)
"""What a question or answer may name; a turn carries a number for each."""

PARTS = 10
_ALIASES = {"shapes": "shape", "ashape": "shape", "acolor": "color", "spot": "edge"}
_SLOT = re.compile(r"(\s?)\{([a-z]+?)(\d?)\}")
_IGNORED = -100


@dataclass(frozen=True)
class Turn:
    """A question and its answer: their kinds (B,) and the values (B, V) of their slots. A sample that is not `given`
    the turn ends before it."""

    kind: Tensor
    reply: Tensor
    values: Tensor
    given: Tensor


@dataclass(frozen=True)
class Sheet:
    """Token ids (B, L), where each image starts (B, images), the rows that predict answer tokens (B, A), and those
    tokens, padded with -100."""

    ids: Tensor
    starts: Tensor
    rows: Tensor
    targets: Tensor


class Book:
    """Fragments and wordings as tables on a device."""

    def __init__(self, tokenizer: Tokenizer, words: Sequence[str], device: torch.device) -> None:
        self.tokenizer, self.device = tokenizer, device
        self.slots = {**SLOTS, "word": tuple(words)}
        self._texts: dict[str, int] = {}
        self.blank = self._fragment("")
        self.opening = torch.tensor([self._fragment(text) for text in self._systems()], device=device)
        self.user = self._fragment("<|im_start|>user\n")
        self.assistant = self._fragment("<|im_end|>\n<|im_start|>assistant\n")
        self.end, self.newline = self._fragment("<|im_end|>"), self._fragment("\n")
        self.image = self._run("<|image_pad|>")
        self.video = self._run("<|video_pad|>")
        self.vision = (self._fragment("<|vision_start|>"), self._fragment("<|vision_end|>"))
        times = [self._fragment(f"<{tenth / 10:.1f} seconds>") for tenth in range(51)]
        self.times = torch.tensor(times, device=device)
        self.hints = torch.tensor([self._fragment(text) for text in HINTS], device=device)
        self.word_base = {(kind, space): self._series(kind, space) for kind in self.slots for space in ("", " ")}
        question_rows = [[self._parse(text) for text in wordings(kind)] for kind in KINDS]
        self._questions, self._first, self._count = self._table(question_rows)
        self._answers, _, _ = self._table([[self._parse(ANSWERS[reply])] for reply in REPLIES])
        self._tokens, self._lengths = self._fragments()

    def _systems(self) -> Iterable[str]:
        return (f"<|im_start|>system\n{text}<|im_end|>\n" if text else "" for text in SYSTEM)

    def _fragment(self, text: str) -> int:
        return self._texts.setdefault(text, len(self._texts))

    def _run(self, token: str) -> int:
        """A fragment that stands for all rows of an image, and gets the length of the image."""
        return self._fragment(token)

    def _series(self, kind: str, space: str) -> int:
        """Adds the fragments of all texts of a slot in order, even if two texts are equal. Returns the first."""
        first = len(self._texts)
        for i, text in enumerate(self.slots[kind]):
            self._texts[f"\0{kind}{space}{i}\0{space + text if text else ''}"] = first + i
        return first

    def _parse(self, text: str) -> list[tuple[int, int]]:
        """Splits a wording into parts: (fragment, -1), or (first fragment of a slot, column of its value)."""
        parts: list[tuple[int, int]] = []
        at = 0
        for match in _SLOT.finditer(text):
            space, kind, number = match.groups()
            if text[at : match.start()]:
                parts.append((self._fragment(text[at : match.start()]), -1))
            column = VALUES.index(_ALIASES.get(kind, kind) + number)
            parts.append((self.word_base[kind, space], column))
            at = match.end()
        if text[at:]:
            parts.append((self._fragment(text[at:]), -1))
        assert len(parts) <= PARTS, text
        return parts + [(self.blank, -1)] * (PARTS - len(parts))

    def _table(self, rows: list[list[list[tuple[int, int]]]]) -> tuple[Tensor, Tensor, Tensor]:
        """All wordings (W, PARTS, 2), and for each kind the index of its first wording and how many it has."""
        flat = torch.tensor([row for kind in rows for row in kind], device=self.device)
        counts = torch.tensor([len(kind) for kind in rows], device=self.device)
        return flat, counts.cumsum(0) - counts, counts

    def _fragments(self) -> tuple[Tensor, Tensor]:
        texts = [text.rpartition("\0")[2] for text in self._texts]
        encoded = [item.ids for item in self.tokenizer.encode_batch(texts, add_special_tokens=False)]
        longest = max(map(len, encoded))
        table = torch.tensor([ids + [0] * (longest - len(ids)) for ids in encoded], device=self.device)
        return table, torch.tensor([len(ids) for ids in encoded], device=self.device)

    def question(self, turn: Turn) -> Tensor:
        """(B, PARTS + 1) fragments of a random wording; one question in eight ends with a hint."""
        count = self._count[turn.kind]
        row = self._first[turn.kind] + (torch.rand(count.shape, device=self.device) * count).long()
        hint = torch.randint(0, 8 * len(HINTS), count.shape, device=self.device)
        hint = self.hints[hint.masked_fill(hint >= len(HINTS), 0)]
        return torch.cat([self._fill(self._questions[row], turn.values), hint[:, None]], 1)

    def answer(self, turn: Turn) -> Tensor:
        return self._fill(self._answers[turn.reply], turn.values)

    def _fill(self, parts_BP2: Tensor, values_BV: Tensor) -> Tensor:
        base, column = parts_BP2.unbind(-1)
        value = values_BV.gather(1, column.clamp(min=0))
        return base + value * (column >= 0)

    def constant(self, batch: int, fragment: int) -> Tensor:
        return torch.full((batch, 1), fragment, device=self.device)

    def compose(
        self, parts_BS: Tensor, is_answer_BS: Tensor, *, units: int, num_tokens: int, num_answers: int
    ) -> Sheet:
        """Joins fragments. An image fragment takes `units` tokens. The end is cut off if it does not fit."""
        is_image = (parts_BS == self.image) | (parts_BS == self.video)
        lengths = torch.where(is_image, torch.full_like(parts_BS, units), self._lengths[parts_BS])
        starts = lengths.cumsum(1) - lengths
        tokens = self._tokens[parts_BS]
        inner = torch.arange(tokens.shape[-1], device=self.device)
        place = (starts.unsqueeze(-1) + inner).masked_fill(inner >= self._lengths[parts_BS].unsqueeze(-1), num_tokens)
        place = place.clamp(max=num_tokens).flatten(1)
        ids = tokens.new_zeros(len(parts_BS), num_tokens + 1).scatter_(1, place, tokens.flatten(1))[:, :num_tokens]
        asked = is_answer_BS.unsqueeze(-1).expand_as(tokens).flatten(1).long()
        wanted = torch.zeros_like(ids[:, :1]).expand(-1, num_tokens + 1).contiguous().scatter_(1, place, asked)
        rows, targets = _gather_answers(ids, wanted[:, :num_tokens].bool(), num_answers)
        order = torch.where(is_image, starts, torch.full_like(starts, num_tokens)).sort(1).values
        return Sheet(ids, order, rows, targets)


def _gather_answers(ids_BL: Tensor, wanted_BL: Tensor, num: int) -> tuple[Tensor, Tensor]:
    rank = (wanted_BL.cumsum(1) - 1).masked_fill(~wanted_BL, num).clamp(max=num)
    places = torch.arange(ids_BL.shape[1], device=ids_BL.device).expand_as(ids_BL)
    rows = torch.ones(len(ids_BL), num + 1, dtype=torch.long, device=ids_BL.device).scatter_(1, rank, places)[:, :num]
    targets = torch.full((len(ids_BL), num + 1), _IGNORED, device=ids_BL.device).scatter_(1, rank, ids_BL)[:, :num]
    return rows - 1, targets
