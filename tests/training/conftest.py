"""A recipe at toy scale: Pillow's font, made-up strokes, a few words; no file is needed."""

import random
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from training.backdrops import Palette
from training.batches import Recipe
from training.data import pack_digits, read_font
from training.dialogue import Book
from training.model import Shape
from training.scenes import Studio
from training.sprites import make_bank
from training.vocabulary import make_tokenizer

WORDS = ["cat", "house", "river", "go", "planet"]
WORDS += [a + b + c for a in ("ba", "tri", "no", "ske", "lum") for b in "aeiou" for c in ("rn", "st", "ck", "mp", "l")]
SMALL = Shape(
    hidden_size=64, layers=4, heads=2, kv_heads=1, intermediate_size=96, vision_size=64, vision_layers=4, vision_heads=2
)


@dataclass(frozen=True)
class Class:
    tokenizer: Tokenizer
    recipe: Recipe

    @property
    def studio(self) -> Studio:
        return self.recipe.studio


@pytest.fixture(autouse=True)
def same_choices() -> None:
    """A recipe draws from torch, which tests seed, and from Python's own generator."""
    random.seed(1)


@pytest.fixture(scope="session")
def school() -> Class:
    glyphs, advances = read_font(None)
    digits = np.random.default_rng(0).integers(0, 256, (40, 28, 28)).astype(np.uint8)
    tensors = {
        "digits": torch.from_numpy(pack_digits(digits)),
        "labels": torch.arange(40, dtype=torch.uint8) % 10,
        "glyphs": torch.from_numpy(glyphs[None]),
        "advances": torch.from_numpy(advances[None]),
        "words": torch.tensor([[ord(c) - 97 for c in w] + [26] * (7 - len(w)) for w in WORDS], dtype=torch.uint8),
    }
    device = torch.device("cpu")
    tokenizer = make_tokenizer(WORDS)
    studio = Studio(make_bank(tensors, device, num_heldout=5), Palette.on(device), device)
    return Class(tokenizer, Recipe(studio, Book(tokenizer, WORDS, device), SMALL, len(WORDS), torch.float32))
