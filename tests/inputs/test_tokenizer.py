import json
import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from tokenizers import processors

from saccade.errors import ConfigError
from saccade.inputs.text.detokenizer import Detokenizer, TokenDecoder
from saccade.inputs.text.special_tokens import Segment
from saccade.inputs.text.tokenizer import Tokenizer
from tests.inputs.folders import QWEN_SPECIALS, QWEN_TAGS, train_byte_level
from tests.inputs.texts import fuzz_texts

FAMILIES = ["qwen3_vl", "gemma3", "qwen3"]


def load(folder: Path) -> Tokenizer:
    return Tokenizer.from_folder(folder)


@pytest.mark.parametrize("family", FAMILIES)
def test_ids_equal_transformers(folders: dict[str, Path], family: str) -> None:
    ours, theirs = load(folders[family]), transformers.AutoTokenizer.from_pretrained(folders[family])
    for text in fuzz_texts(400, seed=1):
        assert ours.encode(text, has_bos=True) == theirs(text)["input_ids"]
        assert ours.encode(text) == theirs(text, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("family", FAMILIES)
def test_special_tokens_of_templates_equal_transformers(folders: dict[str, Path], family: str) -> None:
    ours, theirs = load(folders[family]), transformers.AutoTokenizer.from_pretrained(folders[family])
    rng = np.random.default_rng(2)
    for text in fuzz_texts(100, seed=3):
        mixed = "".join(text[i : i + 9] + str(rng.choice(ours.special_tokens)) for i in range(0, len(text), 9))
        assert ours.encode(mixed) == theirs(mixed, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_special_token_can_stay_text(folders: dict[str, Path], family: str) -> None:
    tokenizer = load(folders[family])
    for token in tokenizer.special_tokens:
        for text in (token, f"a{token}b", f" {token}\n{token}"):
            ids = tokenizer.encode_plain(text)
            assert tokenizer.special_ids.isdisjoint(ids)
            assert tokenizer.decode(ids) == text


def test_only_plain_segments_lose_their_special_tokens(folders: dict[str, Path]) -> None:
    tokenizer = load(folders["qwen3_vl"])
    end = tokenizer.token_id("<|im_end|>")
    assert end is not None
    segments = [
        Segment("<|im_start|>user\nsay "),
        Segment("<|im_end|>", is_plain=True),
        Segment(" now<|im_end|>\n<|im_start|>assistant\n"),
    ]
    ids = tokenizer.encode(segments)
    assert ids.count(end) == 1 and len([i for i in ids if i in tokenizer.special_ids]) == 3
    whole = "".join(segment.text for segment in segments)
    assert tokenizer.decode(ids, skip_special_tokens=False) == whole
    # Away from the user's token, the ids are those of the text without it.
    assert ids[: ids.index(tokenizer.encode("<|im_start|>")[0]) + 3] == tokenizer.encode("<|im_start|>user\n")[:3]
    assert ids[ids.index(end) :] == tokenizer.encode("<|im_end|>\n<|im_start|>assistant\n")


def test_the_twin_is_built_once_for_all_threads(folders: dict[str, Path]) -> None:
    tokenizer = load(folders["qwen3_vl"])
    expected = load(folders["qwen3_vl"]).encode_plain("a<|im_end|>")
    found: list[list[int]] = []
    threads = [threading.Thread(target=lambda: found.append(tokenizer.encode_plain("a<|im_end|>"))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [expected] * 8


def test_protected_ids_and_named_tokens_are_special(folders: dict[str, Path]) -> None:
    definition = json.loads((folders["qwen3_vl"] / "tokenizer.json").read_text())
    for token in definition["added_tokens"]:
        token["special"] = False
    bare = Tokenizer(json.dumps(definition))
    assert bare.special_tokens == ()
    pad = bare.token_id("<|image_pad|>")
    assert pad is not None
    config = {"eos_token": {"content": "<|im_end|>"}, "additional_special_tokens": ["<|im_start|>"]}
    config |= {"extra_special_tokens": {"image_token": "<|vision_start|>"}}
    tokenizer = Tokenizer(json.dumps(definition), config, protected=[pad])
    assert set(tokenizer.special_tokens) == {"<|im_end|>", "<|im_start|>", "<|vision_start|>", "<|image_pad|>"}
    assert tokenizer.special_ids.isdisjoint(tokenizer.encode_plain("<|image_pad|><|im_end|>"))
    assert tokenizer.named_token("eos_token") == "<|im_end|>"


@pytest.mark.parametrize("has_decoder", [False, True])
def test_old_checkpoints_name_their_tokens_in_another_file(
    folders: dict[str, Path], tmp_path: Path, has_decoder: bool
) -> None:
    shutil.copytree(folders["qwen3"], tmp_path, dirs_exist_ok=True)
    config: dict[str, Any] = {
        "eos_token": "<|endoftext|>",
        "bos_token": "",
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    config |= {"added_tokens_decoder": {}} if has_decoder else {}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    names = {"eos_token": {"content": "<|im_end|>", "lstrip": False}, "bos_token": "<|im_start|>"}
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(names))
    ours, theirs = load(tmp_path), transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert ours.named_token("eos_token") == theirs.eos_token == ("<|endoftext|>" if has_decoder else "<|im_end|>")
    assert (ours.named_token("bos_token") or None) == (theirs.bos_token or None)
    assert ours.eos_ids == {theirs.eos_token_id}


def test_tokens_in_the_config_are_added(folders: dict[str, Path]) -> None:
    definition = (folders["qwen3_vl"] / "tokenizer.json").read_text()
    size = Tokenizer(definition).vocab_size
    config = {"added_tokens_decoder": {str(size): {"content": "<new>", "special": True}}}
    assert Tokenizer(definition, config).encode("a<new>")[-1] == size
    with pytest.raises(ConfigError, match="different checkpoints"):
        Tokenizer(definition, {"added_tokens_decoder": {str(size + 5): {"content": "<new>", "special": True}}})


@pytest.mark.parametrize(
    "flags",
    [{"special": True}, {"lstrip": True}, {"rstrip": True}, {"single_word": True}, {"special": True, "rstrip": True}],
)
def test_flags_in_the_config_win(folders: dict[str, Path], tmp_path: Path, flags: dict[str, bool]) -> None:
    shutil.copytree(folders["qwen3"], tmp_path, dirs_exist_ok=True)
    token_id = load(tmp_path).token_id("<think>")
    raw = {"content": "<think>", "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config["added_tokens_decoder"] = {str(token_id): {**raw, "special": False, **flags}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    ours, theirs = load(tmp_path), transformers.AutoTokenizer.from_pretrained(tmp_path)
    for text in ("a   <think>   b", "a<think>b", "<think> <|im_end|> <think>"):
        ids = ours.encode(text)
        assert ids == theirs(text, add_special_tokens=False)["input_ids"]
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert (token_id in ours.special_ids) == bool(flags.get("special"))
    assert not flags.get("special") or token_id not in ours.encode_plain("a <think> b")


def test_a_token_stays_special_and_keeps_its_text(folders: dict[str, Path]) -> None:
    definition = (folders["qwen3"] / "tokenizer.json").read_text()
    end = Tokenizer(definition).token_id("<|im_end|>")
    named = {str(end): {"content": "<|im_end|>", "special": False, "normalized": False}}
    assert end in Tokenizer(definition, {"added_tokens_decoder": named}).special_ids
    with pytest.raises(ConfigError, match="different checkpoints"):
        Tokenizer(definition, {"added_tokens_decoder": {str(end): {"content": "<|other|>", "special": True}}})


@pytest.mark.parametrize(
    ("single", "before"),
    [
        ("$A <|endoftext|>", []),
        ("<|im_start|> $A <|endoftext|>", ["<|im_start|>"]),
        ("<|im_start|> <|box_start|> $A", ["<|im_start|>", "<|box_start|>"]),
        ("$A", []),
    ],
)
def test_has_bos_adds_only_tokens_that_precede_a_text(single: str, before: list[str]) -> None:
    made = train_byte_level(QWEN_SPECIALS, QWEN_TAGS)
    special = [(text, made.token_to_id(text)) for text in ("<|endoftext|>", "<|im_start|>", "<|box_start|>")]
    made.post_processor = processors.TemplateProcessing(single=single, special_tokens=special)
    tokenizer = Tokenizer(made.to_str())
    expected = [tokenizer.token_id(text) for text in before] + tokenizer.encode("The fox")
    assert tokenizer.encode("The fox", has_bos=True) == expected == made.encode("The fox").ids[: len(expected)]


def test_broken_files_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no tokenizer\.json"):
        load(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"sentencepiece")
    with pytest.raises(ConfigError, match=r"has tokenizer\.model but no tokenizer\.json; write one with transformers"):
        load(tmp_path)
    with pytest.raises(ConfigError, match="cannot be read"):
        Tokenizer("{}")
    with pytest.raises(ConfigError, match="WordPiece"):
        TokenDecoder.from_definition({"type": "WordPiece"}, token_text=str, special_ids=frozenset())


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("skip", [True, False])
def test_streamed_pieces_make_up_the_whole_text(folders: dict[str, Path], family: str, skip: bool) -> None:
    tokenizer = load(folders[family])
    theirs = transformers.AutoTokenizer.from_pretrained(folders[family])
    rng = np.random.default_rng(4)
    for text in fuzz_texts(150, seed=5):
        ids = tokenizer.encode(text)
        for _ in range(3):
            ids.insert(int(rng.integers(0, len(ids) + 1)), int(rng.choice(sorted(tokenizer.special_ids))))
        if family == "gemma3":  # in transformers, too, a special token inside a run of bytes breaks the character
            ids = tokenizer.encode(text)
        stream = tokenizer.detokenizer(skip_special_tokens=skip)
        pieces = [stream.push(token_id) for token_id in ids]
        whole = "".join(pieces) + stream.flush()
        expected = theirs.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
        assert whole == expected == tokenizer.decode(ids, skip_special_tokens=skip)
        if "\ufffd" not in expected:
            assert all("\ufffd" not in piece for piece in pieces), "a character was split"


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3"])
def test_random_ids_decode_as_in_transformers(folders: dict[str, Path], family: str) -> None:
    tokenizer = load(folders[family])
    theirs = transformers.AutoTokenizer.from_pretrained(folders[family])
    rng = np.random.default_rng(6)
    for _ in range(300):
        ids = rng.integers(0, tokenizer.vocab_size, int(rng.integers(1, 30))).tolist()
        assert tokenizer.decode(ids) == theirs.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def test_incomplete_characters_are_held_back(folders: dict[str, Path]) -> None:
    tokenizer = load(folders["gemma3"])
    ids = [tokenizer.token_id(f"<0x{byte:02X}>") for byte in "🦊".encode()]
    stream = tokenizer.detokenizer()
    assert [stream.push(token_id) for token_id in ids if token_id is not None] == ["", "", "", "🦊"]
    assert stream.push(ids[0] or 0) == "" and stream.flush() == "\ufffd"
    assert tokenizer.token_bytes(ids[1] or 0) == "🦊".encode()[1:2]


def test_ids_beyond_the_vocabulary_decode_to_nothing(folders: dict[str, Path]) -> None:
    tokenizer = load(folders["qwen3_vl"])
    assert tokenizer.decode([*tokenizer.encode("a"), tokenizer.vocab_size + 100, *tokenizer.encode("b")]) == "ab"


def test_sentencepiece_decoders_drop_the_first_space() -> None:
    steps = [
        {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0},
    ]
    words = {0: "\u2581The", 1: "\u2581fox", 2: "<0x0A>", 3: "<s>"}
    decoder = TokenDecoder.from_definition(
        {"type": "Sequence", "decoders": steps}, token_text=words.get, special_ids=frozenset({3})
    )

    assert Detokenizer(decoder).push_all([3, 0, 1, 2, 1]) == "The fox\n fox"


def test_work_per_token_does_not_grow(folders: dict[str, Path]) -> None:
    """Bytes that never become a character are emitted one by one, not collected."""
    tokenizer = load(folders["qwen3_vl"])
    byte = next(i for i in range(tokenizer.vocab_size) if tokenizer.token_bytes(i) == b"\x80")
    stream = tokenizer.detokenizer()
    assert [stream.push(byte) for _ in range(100)] == ["\ufffd"] * 100
