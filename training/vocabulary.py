"""The tokenizer of the small model: a byte-level BPE in Qwen's manner, with Qwen's special tokens under their names."""

from collections.abc import Sequence

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from training.language import LETTERS, corpus

SIZE = 1024
SPECIALS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
TAGS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def token_id(tokenizer: Tokenizer, text: str) -> int:
    found = tokenizer.token_to_id(text)
    assert found is not None, f"the vocabulary has no {text}"
    return found


def make_tokenizer(words: Sequence[str]) -> Tokenizer:
    """Learns merges from the questions and answers of the recipe and from `words`.

    Capital letters never follow each other there, so a word in capitals is read and written letter by letter, as
    digits are by Qwen's rule.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    own = len(SPECIALS) + len(TAGS)
    trainer = trainers.BpeTrainer(vocab_size=SIZE - own, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(list(corpus(tuple(words))), trainer)
    tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in SPECIALS])
    tokenizer.add_tokens([AddedToken(text, normalized=False, special=False) for text in TAGS])
    assert tokenizer.get_vocab_size() == SIZE, tokenizer.get_vocab_size()
    assert len(tokenizer.encode(LETTERS + LETTERS[::-1]).ids) == 2 * len(LETTERS)
    return tokenizer
