"""The questions and answers of the small model, as data.

A wording is a text with slots in braces. A slot is a kind and, where a text needs two of a kind, a number: `{shape}`,
`{color1}`. Questions of one kind are told apart only by their wording; each is also asked in lower case without its
final mark, and, where it has the word, with the British spelling.
"""

import re
from collections.abc import Iterator, Mapping

from training.two_parts import TWO_PARTS

SHAPES = ("circle", "square", "triangle", "star", "cross", "diamond", "heart", "ring", "rectangle", "oval")
COLORS = (
    ("red", "green", "blue", "yellow", "orange", "purple")  # twelve, in two rows
    + ("pink", "brown", "black", "white", "gray", "cyan")
)
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
MAX_NUMBER = 40
RELATIONS = (
    ("to the left of", "left of"),
    ("to the right of", "right of"),
    ("above", "over"),
    ("below", "under"),
)


def _article(word: str) -> str:
    return f"an {word}" if word[0] in "aeiou" else f"a {word}"


SLOTS: Mapping[str, tuple[str, ...]] = {
    "shape": SHAPES,
    "shapes": tuple(name + ("es" if name.endswith("s") else "s") for name in SHAPES),
    "ashape": tuple(map(_article, SHAPES)),
    "color": COLORS,
    "acolor": tuple(map(_article, COLORS)),
    "digit": tuple("0123456789") + ("",),  # the last pads numbers that have fewer digits
    "letter": tuple(LETTERS) + ("",),
    "number": tuple(map(str, range(MAX_NUMBER + 1))),
    "relation": tuple(text for pair in RELATIONS for text in pair),
    "side": ("left", "right", "above", "below"),
    "edge": ("left", "right", "top", "bottom"),
    "spot": ("on the left", "on the right", "at the top", "at the bottom"),
    "way": ("left", "right", "up", "down"),
    "size": ("bigger", "smaller"),
    "which": ("first", "second"),
    "yes": ("no", "yes"),
}
"""The texts of each kind of slot. Those of "word" come from a dictionary in the data."""

QUESTIONS: Mapping[str, tuple[str, ...]] = {
    "shape": (
        "What shape is this?",
        "Which shape do you see?",
        "Name the shape.",
        "What shape is in the picture?",
        "What is the shape?",
        "What kind of shape is it?",
    ),
    "color": (
        "What color is it?",
        "What color is the shape?",
        "Which color do you see?",
        "Name the color of the shape.",
        "What is the color of this shape?",
    ),
    "color of": (
        "What color is the {shape}?",
        "Which color does the {shape} have?",
        "What is the color of the {shape}?",
        "Tell me the color of the {shape}.",
    ),
    "shape of": (
        "What shape is {color}?",
        "Which shape is {color}?",
        "What is the {color} shape?",
        "Name the {color} shape.",
    ),
    "count all": (
        "How many shapes are there?",
        "How many objects do you see?",
        "Count the shapes.",
        "How many shapes are in the picture?",
        "How many things are there?",
    ),
    "count shape": (
        "How many {shapes} are there?",
        "How many {shapes} do you see?",
        "Count the {shapes}.",
        "How many {shapes} are in the picture?",
        "What is the number of {shapes}?",
    ),
    "count color": (
        "How many {color} shapes are there?",
        "Count the {color} shapes.",
        "How many shapes are {color}?",
        "How many {color} objects do you see?",
    ),
    "count both": (
        "How many {color} {shapes} are there?",
        "Count the {color} {shapes}.",
        "How many {color} {shapes} do you see?",
        "How many {color} {shapes} are in the picture?",
    ),
    "has shape": (
        "Is there {ashape}?",
        "Is there {ashape} in the picture?",
        "Do you see {ashape}?",
        "Does the picture show {ashape}?",
    ),
    "has color": ("Is there {acolor} shape?", "Do you see {acolor} shape?", "Is any shape {color}?"),
    "has both": (
        "Is there {acolor} {shape}?",
        "Do you see {acolor} {shape}?",
        "Is there {acolor} {shape} in the picture?",
    ),
    "relation": (
        "Is the {shape} {relation} the {shape1}?",
        "Is the {shape} {relation} the {shape1} in the picture?",
        "Tell me if the {shape} is {relation} the {shape1}.",
    ),
    "relation both": ("Is the {color} {shape} {relation} the {color1} {shape1}?",),
    "left or right": (
        "Is the {shape} left or right of the {shape1}?",
        "Is the {shape} to the left or right of the {shape1}?",
    ),
    "above or below": ("Is the {shape} above or below the {shape1}?",),
    "where": (
        "Where is the {shape} relative to the {shape1}?",
        "Where is the {shape} compared to the {shape1}?",
        "Seen from the {shape1}, where is the {shape}?",
    ),
    "shape at": ("What shape is {spot}?", "Which shape is {spot}?", "Name the shape {spot}."),
    "color at": ("What color is the shape {spot}?", "Which color does the shape {spot} have?"),
    "next to": ("What shape is {relation} the {shape1}?", "Which shape is {relation} the {shape1}?"),
    "on the left": ("Is the {shape} on the left or on the right?", "On which side is the {shape}, left or right?"),
    "at the top": ("Is the {shape} at the top or at the bottom?", "Where is the {shape}, top or bottom?"),
    "describe": (
        "What is this?",
        "What do you see?",
        "Describe the picture.",
        "What is in this picture?",
        "What is in the image?",
        "Describe this image.",
        "What does the picture show?",
        "What can you see in this image?",
        "Describe this picture.",
        "Describe the image.",
        "What is shown here?",
        "Tell me what you see.",
        "What is on this picture?",
        "Describe what you see.",
        "What do you see in the picture?",
        "What do you see in this image?",
        "What is in this image?",
        "What is in the picture?",
        "What is in this photo?",
        "What is shown in this image?",
        "What is shown in the picture?",
        "What does this image show?",
        "What does the image contain?",
        "What can you see in the picture?",
        "Can you describe this picture?",
        "Can you describe the image?",
        "Please describe the picture.",
        "Describe this photo.",
        "Describe the picture in a few words.",
        "Tell me what is in the picture.",
        "Tell me what this is.",
        "Say what you see.",
        "Say what is in the image.",
        "What things do you see?",
        "Look at the picture. What is it?",
        "Look at this image and describe it.",
        "Write a description of this picture.",
        "Give me a caption for this image.",
        "What is there to see?",
        "What can be seen in this image?",
        "What is to be seen here?",
        "What appears in the image?",
        "What objects are visible here?",
        "Which things are visible in this photo?",
        "What is depicted here?",
        "What is displayed in the image?",
        "What is this a picture of?",
        "What does this drawing show?",
        "What do we see here?",
        "Describe everything you see.",
        "Describe all that is in the picture.",
        "Describe what is shown.",
        "Tell me about the picture.",
        "Tell me about this photo.",
        "Please tell me what you see.",
        "Can you tell me what is in the image?",
        "Give a description of this image.",
        "Give me a short description.",
        "List what is in the picture.",
        "List the things in this image.",
        "Name everything in the picture.",
    ),
    "digit": (
        "What digit is this?",
        "Which digit do you see?",
        "What number is this?",
        "Read the digit.",
        "What digit is in the picture?",
        "Which digit is it?",
    ),
    "is digit": ("Is this the digit {digit}?", "Is it the number {digit}?", "Does the picture show the digit {digit}?"),
    "color of digit": ("What color is the digit?", "What color is the number?", "Which color does the number have?"),
    "number": (
        "What number is this?",
        "Which number do you see?",
        "Read the number.",
        "What is the number in the picture?",
        "What number is written here?",
    ),
    "read": (
        "What does it say?",
        "Read the word.",
        "What word is this?",
        "What is written here?",
        "Read the text.",
        "What text is in the picture?",
        "Which word do you see?",
        "What does the text say?",
    ),
    "color of text": ("What color is the word?", "What color is the text?"),
    "letters": ("How many letters does the word have?", "Count the letters."),
    "first letter": ("What is the first letter?", "Which letter comes first?"),
    "last letter": ("What is the last letter?", "Which letter comes last?"),
    "more": (
        "Which picture has more {shapes}?",
        "Which picture has more {shapes}, the first or the second?",
        "In which picture are more {shapes}?",
    ),
    "more all": ("Which picture has more shapes?", "Which picture has more shapes, the first or the second?"),
    "describe pair": (
        "Describe these images.",
        "Describe the two pictures.",
        "Describe both images.",
        "Describe the pictures.",
        "What do the pictures show?",
        "What do these images show?",
        "What do you see in the two pictures?",
        "What is in these pictures?",
        "What is in the two images?",
        "Tell me what is in both pictures.",
    ),
    "same shape": (
        "Do the two pictures show the same shape?",
        "Are the two shapes the same?",
        "Do both pictures show the same shape?",
    ),
    "same color": (
        "Do the shapes have the same color?",
        "Are the two shapes the same color?",
        "Is the color the same in both pictures?",
    ),
    "which has": ("Which picture has {ashape}?", "Which picture shows {ashape}, the first or the second?"),
    "shape in": ("What shape is in the {which} picture?", "Name the shape in the {which} picture."),
    "color in": ("What color is the shape in the {which} picture?", "Which color is in the {which} picture?"),
    "digit in": ("What digit is in the {which} picture?", "Read the digit in the {which} picture."),
    "larger": ("Which picture shows the larger digit?", "Which digit is larger, the first or the second?"),
    "move": (
        "Which way does it move?",
        "Which way does the shape move?",
        "In which direction does the {shape} move?",
        "Where does the {shape} go?",
        "Which way does the {shape} move?",
    ),
    "grow": ("Does it get bigger or smaller?", "Does the {shape} get bigger or smaller?"),
    "shape moves": ("What shape is moving?", "Which shape do you see in the video?", "What shape is in the video?"),
    "color moves": ("What color is the moving shape?", "What color is the shape in the video?"),
    "sum": (
        "What is {number} + {number1}?",
        "How much is {number} + {number1}?",
        "{number} + {number1} =",
        "What is {number} plus {number1}?",
    ),
    "difference": ("What is {number} - {number1}?", "{number} - {number1} =", "What is {number} minus {number1}?"),
    "is larger": ("Is {number} larger than {number1}?", "Is {number} more than {number1}?"),
    "copy": ("Repeat: {word}", "Say {word}.", "Repeat the word {word}.", "Copy this word: {word}"),
    "hello": ("Hello!", "Hello", "Hi!", "Hi", "Good morning!", "Hey"),
    "who": (
        "Who are you?",
        "What are you?",
        "What can you do?",
        "What do you know?",
        "What can I ask you?",
        "Help",
        "Who made you?",
    ),
    "unknown": (
        "What is the capital of France?",
        "What is the capital of {word}?",
        "Who is the president?",
        "Who painted this?",
        "Who wrote {word}?",
        "Where was this photo taken?",
        "When was this made?",
        "How old is the dog?",
        "How old is the {word}?",
        "What breed is the cat?",
        "What is the weather like?",
        "Is it going to rain?",
        "What is the man wearing?",
        "What is the woman doing?",
        "What does the {word} taste like?",
        "Why is the sky blue?",
        "Why is the {word} here?",
        "How do I cook {word}?",
        "What is the meaning of {word}?",
        "What is the price of this?",
        "How much does the {word} cost?",
        "Which country is this?",
        "Tell me a joke.",
        "Tell me a story about a {word}.",
        "Write a poem about {word}.",
        "Write a program that sorts a list.",
        "Translate {word} into French.",
        "What is the name of this person?",
        "What is the name of the {word}?",
        "Who won the game?",
        "What year is it?",
        "What time is it?",
        "Is this person happy?",
        "What car is this?",
        "Which animal is this?",
        "What kind of {word} is it?",
        "Explain {word}.",
        "Is {word} good for you?",
        "Can you help me with my {word}?",
        "What happens after the {word}?",
        "Where can I buy a {word}?",
        "Do you like {word}?",
        "How many people live in {word}?",
        "What is {word}?",
        "Summarize the history of {word}.",
    ),
} | TWO_PARTS

ANSWERS: Mapping[str, str] = {
    "shape": "{shape}",
    "color": "{color}",
    "number": "{number}",
    "result": "{number2}",
    "yes": "{yes}",
    "side": "{side}",
    "edge": "{edge}",
    "way": "{way}",
    "size": "{size}",
    "which": "{which}",
    "one": "{acolor} {shape}",
    "two": "{acolor} {shape} and {acolor1} {shape1}",
    "three": "{acolor} {shape}, {acolor1} {shape1} and {acolor2} {shape2}",
    "many": "{number} shapes",
    "counted one": "{number}: {acolor} {shape}",
    "counted two": "{number}: {acolor} {shape} and {acolor1} {shape1}",
    "counted three": "{number}: {acolor} {shape}, {acolor1} {shape1} and {acolor2} {shape2}",
    "counted thing": "{number} {color} {shape}",
    "counted things": "{number} {color} {shapes}",
    "shape there": "{ashape} {spot}",
    "color there": "{color}, {spot}",
    "one and many": "{acolor} {shape} and {number1} shapes",
    "many and one": "{number} shapes and {acolor1} {shape1}",
    "many and many": "{number} shapes and {number1} shapes",
    "two digits": "the digit {digit} and the digit {digit1}",
    "two colors": "{color} and {color1}",
    "two counts": "{number} and {number1}",
    "digits": "{digit}{digit1}{digit2}{digit3}",
    "the digit": "the digit {digit}",
    "the number": "the number {digit}{digit1}{digit2}{digit3}",
    "letters": "{letter}{letter1}{letter2}{letter3}{letter4}{letter5}{letter6}",
    "the word": "the word {letter}{letter1}{letter2}{letter3}{letter4}{letter5}{letter6}",
    "the digit in color": "the digit {digit} in {color}",
    "the number in color": "the number {digit}{digit1}{digit2}{digit3} in {color}",
    "the word in color": "the word {letter}{letter1}{letter2}{letter3}{letter4}{letter5}{letter6} in {color}",
    "copy": "{word}",
    "hello": "Hello! Show me a picture and ask about it.",
    "who": "I am a small model. I name shapes and colors, count, and read digits and short words.",
    "unknown": "I do not know.",
    "blind": "I do not see a picture.",
    "strange": "I do not know this picture.",
}

SYSTEM = ("", "You are a helpful assistant.", "You are a helpful assistant. Answer briefly.", "Answer in one word.")
HINTS = ("", " Answer with one word.", " Answer briefly.", " Answer with a single word.", " Please.")


_COLOR = re.compile(r"\bcolor\b(?!\d?\})")


def wordings(kind: str) -> Iterator[str]:
    """All wordings of this kind of question."""
    for text in QUESTIONS[kind]:
        for spelled in dict.fromkeys((text, _COLOR.sub("colour", text))):
            yield spelled
            if not spelled.startswith("{"):
                yield spelled[0].lower() + spelled[1:].rstrip("?.!")


def corpus(words: tuple[str, ...]) -> Iterator[str]:
    """The texts from which the vocabulary is learned: all wordings and names, repeated often, and ordinary words."""
    texts = [text.format_map(_Blank()) for kind in QUESTIONS for text in wordings(kind)]
    texts += [
        f"{text}\n{text}\n{text}\n{text}\n the {text} {text}"
        for kind, names in SLOTS.items()
        if kind != "letter"
        for text in names
    ]
    texts += [text.format_map(_Blank()) for text in ANSWERS.values()]
    texts += [*SYSTEM, *HINTS, "user\nassistant\nsystem\n<0.0 seconds><1.5 seconds>"]
    yield from texts * 40
    for word in words:
        yield f"{word} {word}"


class _Blank(dict[str, str]):
    def __missing__(self, key: str) -> str:
        return ""
