"""Questions for clients, and their answers. Plain Python, because the clients' own environments run it."""

import base64
from pathlib import Path
from typing import Literal

MODEL = "saccade"
FOLDER = Path(__file__).parents[2] / "examples" / "pictures"
DIGIT = "What digit is this?"  # 7
CIRCLES = "How many circles are there?"  # 2
HEART = "What color is the heart?"  # purple

# In JSON the bundled model knows a digit as text; as a number it guesses.
WrittenDigit = Literal["0", "1", "2", "3", "4", "5", "6", "7", "8", "9"]


def data_url(name: str) -> str:
    return "data:image/png;base64," + base64.b64encode((FOLDER / f"{name}.png").read_bytes()).decode()


def asked(name: str, question: str) -> list[dict[str, object]]:
    """A user's message about a picture, in OpenAI's format."""
    image = {"type": "image_url", "image_url": {"url": data_url(name)}}
    return [{"role": "user", "content": [image, {"type": "text", "text": question}]}]
