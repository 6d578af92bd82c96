"""Strings for tokenizer tests: many scripts, odd spaces, control characters, long runs, code, look-alikes of tokens."""

import numpy as np

_PIECES = [
    "the quick brown fox",
    "WHO'S there? I'LL be",
    "naïve café Zażółć gęślą jaźń",
    "图片里有什么\uff1f日本語のテキスト 한국어",
    "مرحبا بالعالم שלום नमस्ते ไทย",
    "🙂🎉👨‍👩‍👧‍👦🇵🇱 ❤️",
    "e\u0301 a\u0308 \u1100\u1161 ﬁ Å Ω",
    "1234567890 3.14159 0x1F600 1e-9",
    "def f(x):\n\treturn {'a': [1, 2]}  # ok\n",
    "\n\n\n",
    "\r\n \t\u00a0\u2003\u200b\ufeff",
    "    ",
    "<b>bold</b> <0.3 seconds> </s> [INST] <0x41> ▁",
    "https://example.com/?q=a%20b&c=<d>",
    "\x00\x01\x7f\x9f",
    "\ufffd\U0010fffd\ue000",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "!!!???...---===",
    "'s 're  'LL \u2019t",
]


def fuzz_texts(count: int, seed: int) -> list[str]:
    rng = np.random.default_rng(seed)
    texts = []
    for _ in range(count):
        pieces = [str(rng.choice(_PIECES)) for _ in range(int(rng.integers(1, 7)))]
        pieces += [_random_characters(rng) for _ in range(int(rng.integers(0, 3)))]
        rng.shuffle(pieces)
        texts.append(str(rng.choice(["", " ", "\n", "  "])).join(pieces))
    return texts


def _random_characters(rng: np.random.Generator) -> str:
    codes = rng.choice([rng.integers(0x20, 0x7F), rng.integers(0xA0, 0x3000), rng.integers(0x1F300, 0x1F700)], 8)
    return "".join(chr(int(code)) for code in codes)
