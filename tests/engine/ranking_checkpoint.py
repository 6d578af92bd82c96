"""A tiny reranker and embedder: its vocabulary has "yes" and "no", its template is a real one, and its tokenizer
appends a token to every text, as Qwen3-Embedding's does."""

import json
import string
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from tests.engine.rig import image_settings
from tests.inputs.folders import DATA
from tests.models import tiny

VISION = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
TURNS = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
LETTERS = [*string.ascii_letters, *string.digits, *".,:<>\"'?!-_/|()", "Ġ", "Ċ"]


def make_ranker(family: str, folder: Path) -> tiny.Tiny:
    """A checkpoint of `qwen3` or `qwen3_vl` with the chat template of its family."""
    made = tiny.make(family, folder)
    if family in tiny.VISION:
        image_settings(folder)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    specials = ["<pad>", "<bos>", "<eos>"]
    trainer = trainers.BpeTrainer(
        vocab_size=100, special_tokens=specials, initial_alphabet=LETTERS, show_progress=False
    )
    tokenizer.train_from_iterator([*["yes", "no"] * 9, "the query and the document"], trainer)
    while tokenizer.get_vocab_size() < 100:
        tokenizer.add_tokens([f"<unused{tokenizer.get_vocab_size()}>"])
    tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in (*VISION, *TURNS)])
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in ("<think>", "</think>")])
    assert tokenizer.token_to_id("<|image_pad|>") == tiny.IMAGE
    end = tokenizer.token_to_id("<|endoftext|>")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A <|endoftext|>", special_tokens=[("<|endoftext|>", end)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"add_bos_token": False, "eos_token": "<|im_end|>"}))
    (folder / "chat_template.jinja").write_text((DATA / f"inputs_{family}.jinja").read_text())
    return made


def encode(folder: Path, text: str) -> list[int]:
    """Token ids from the tokenizers package, without the appended token."""
    found: list[int] = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text, add_special_tokens=False).ids
    return found
