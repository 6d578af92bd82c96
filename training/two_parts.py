"""Wordings of questions with two parts. Most are combined: either part first, joined in three ways."""

from collections.abc import Iterator, Sequence
from itertools import product

_SHAPE = ("what shape is it", "what shape is this", "which shape do you see", "what is the shape")
_COLOR = ("what color is it", "which color does it have", "what is its color")
_INK = (*_COLOR, "in what color is it written")
_DIGIT = ("what digit is it", "which digit do you see", "what number is this", "what is the number")
_WORD = ("what does it say", "what is written here", "which word is it", "what word do you see")
_SIDE = ("is it on the left or on the right", "on which side is it, left or right")
_HEIGHT = ("is it at the top or at the bottom", "where is it, top or bottom")
_COLOR_OF = ("what color is the {shape}", "which color does the {shape} have", "what is the color of the {shape}")
_SIDE_OF = ("is the {shape} on the left or on the right", "on which side is the {shape}, left or right")
_HEIGHT_OF = ("is the {shape} at the top or at the bottom", "where is the {shape}, top or bottom")
_COUNT = ("how many {shapes} are there", "how many {shapes} do you see", "what is the number of {shapes}")
_THEIR_COLOR = ("what color are they", "which color do they have", "what is their color")
_COLOR_OF_MANY = ("what color are the {shapes}", "which color do the {shapes} have")
_HOW_MANY = ("how many are there", "how many do you see", "how many of them are there")


def _join(firsts: Sequence[str], seconds: Sequence[str]) -> Iterator[str]:
    for first, second in product(firsts, seconds):
        yield f"{_capital(first)}, and {second}?"
        yield f"{_capital(first)} and {second}?"
        yield f"{_capital(first)}? {_capital(second)}?"


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]


def _either_way(firsts: Sequence[str], seconds: Sequence[str]) -> tuple[str, ...]:
    return (*_join(firsts, seconds), *_join(seconds, firsts))


_OFTEN = 3
"""How often a separate wording is repeated among the combined ones."""

TWO_PARTS: dict[str, tuple[str, ...]] = {
    "shape and color": (
        "What shape is it, and what color?",
        "What shape and color is it?",
        "What color and shape is this?",
        "What color is it, and what shape?",
        "Which shape do you see, and which color?",
        "Name the shape and the color.",
        "Name the color and the shape.",
        "Tell me the shape and its color.",
        "Tell me the color and the shape.",
        "What are the shape and the color?",
        *_OFTEN
        * (
            "Tell me what shape it is, and what color.",
            "Say the color first, then the shape.",
            "Name the shape, then its color.",
            "Tell me the shape, then the color.",
            "Tell me which color it has and which shape.",
            "Which shape and which color is it?",
            "Which color is it, and which shape?",
            "Give me the shape and the color.",
            "Which shape is this, and in which color is it drawn?",
            "Color and shape, please.",
        ),
        *_either_way(_SHAPE, _COLOR),
    ),
    "digit and color": (
        "What digit is it, and what color?",
        "Which digit do you see, and in which color?",
        "What number is it, and what color?",
        "Read the number and name its color.",
        "Read the digit and tell me its color.",
        "Name the color and read the digit.",
        *_OFTEN
        * (
            "Which number do you see, and in what color?",
            "Tell me the digit and its color.",
            "Tell me the digit, then the color.",
            "Say the number and the color.",
            "What number is written here, and in which color?",
            "What is the color of the number, and what number is it?",
            "Which digit is written here, and what color is it?",
            "What color is the digit, and which digit is it?",
            "Which color does the number have, and what is the number?",
        ),
        *_either_way(_DIGIT, _INK),
    ),
    "word and color": (
        "What does it say, and in what color?",
        "What is written here, and in which color?",
        "What word is this, and what color?",
        "Read the word and name its color.",
        "Read the text and tell me its color.",
        "Name the color and read the word.",
        *_OFTEN
        * (
            "Which word do you see, and in what color?",
            "Tell me the word and its color.",
            "Tell me what it says, then the color.",
            "Say the word and the color.",
            "What word is written here, and in which color?",
            "What is the color of the word, and what does it say?",
            "What color is the text, and what is written?",
            "Which color does the word have, and which word is it?",
        ),
        *_either_way(_WORD, _INK),
    ),
    "count and color": (
        "How many {shapes} are there, and in what color?",
        "Count the {shapes} and name their color.",
        "Name the color of the {shapes} and count them.",
        "Count the {shapes}, and tell me what color they are.",
        "Tell me how many {shapes} there are, and their color.",
        "How many {shapes} can you count, and in which color?",
        "What color are the {shapes}, and how many do you count?",
        "Tell me the color of the {shapes} and their number.",
        "How many {shapes} are in the picture, and what is their color?",
        "Name the color of the {shapes}, then count them.",
        *_join(_COUNT, _THEIR_COLOR),
        *_join(_COLOR_OF_MANY, _HOW_MANY),
    ),
    "shape and side": (
        "Name the shape and its side, left or right.",
        *_OFTEN
        * (
            "Tell me the shape and its side, left or right.",
            "Say what shape it is, and whether it is on the left or on the right.",
            "What shape is it, and where is it, left or right?",
            "Where is it, left or right, and what shape is it?",
            "Left or right: which side is it on? And what shape?",
            "Is it left or right, and which shape is it?",
            "Which shape do you see, and on which side, left or right?",
            "On the left or on the right: where do you see it, and what is the shape?",
            "Name the side, left or right, and the shape.",
        ),
        *_either_way(_SHAPE, _SIDE),
    ),
    "shape and height": (
        "Name the shape and its place, top or bottom.",
        *_OFTEN
        * (
            "Tell me the shape and its place, top or bottom.",
            "Say what shape it is, and whether it is at the top or at the bottom.",
            "What shape is it, and where is it, top or bottom?",
            "Top or bottom: where is it? And what shape?",
            "Is it top or bottom, and which shape is it?",
            "Name the place, top or bottom, and the shape.",
        ),
        *_either_way(_SHAPE, _HEIGHT),
    ),
    "color and side": (*_join(_COLOR_OF, _SIDE), *_join(_SIDE_OF, _COLOR)),
    "color and height": (*_join(_COLOR_OF, _HEIGHT), *_join(_HEIGHT_OF, _COLOR)),
    "thing at": (
        "What is {spot}?",
        "What do you see {spot}?",
        "What shape is {spot}, and what color is it?",
        "What shape is {spot} and what color does it have?",
        "Which shape is {spot}, and which color?",
        "What color and shape is {spot}?",
        "Name the shape {spot} and its color.",
        "Tell me the shape and the color of what is {spot}.",
    ),
    "colors of two": (
        "What color is the {shape} and what color is the {shape1}?",
        "What color is the {shape}, and the {shape1}?",
        "What are the colors of the {shape} and the {shape1}?",
        "Tell me the colors of the {shape} and the {shape1}.",
        "Which color does the {shape} have, and which the {shape1}?",
        "What color is the {shape}? And the {shape1}?",
    ),
    "counts of two": (
        "How many {shapes} are there, and how many {shapes1}?",
        "How many {shapes} and how many {shapes1} are there?",
        "How many {shapes} and {shapes1} do you see?",
        "Count the {shapes} and the {shapes1}.",
        "How many {shapes} do you see, and how many {shapes1}?",
    ),
    "count and name": (
        "How many shapes are there, and which?",
        "How many shapes are there and what are they?",
        "How many things do you see, and which ones?",
        "Count the shapes and name them.",
        "Name the shapes and count them.",
        "What shapes are there, and how many?",
    ),
}
