"""Real vocabularies and chat templates give the same ids and texts as transformers."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import transformers

from saccade.errors import RequestError
from saccade.inputs.processor import Processor
from tests.inputs.test_chat import conversations, hostile_texts
from tests.inputs.texts import fuzz_texts
from tests.inputs.vocabularies import PACKAGES, fetch_vocabulary


class Pair(NamedTuple):
    ours: Processor
    theirs: Any


@pytest.fixture(scope="module", params=PACKAGES)
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    folder = fetch_vocabulary(request.param)
    yield Pair(Processor.from_folder(folder), transformers.AutoTokenizer.from_pretrained(folder))


def test_400_fuzzed_strings_have_the_same_ids(pair: Pair) -> None:
    for text in fuzz_texts(400, seed=21):
        assert pair.ours.tokenizer.encode(text, has_bos=True) == pair.theirs(text)["input_ids"]


def test_ids_decode_to_the_same_text(pair: Pair) -> None:
    tokenizer = pair.ours.tokenizer
    for text in fuzz_texts(200, seed=22):
        ids = tokenizer.encode(text)
        stream = tokenizer.detokenizer()
        pieces = [stream.push(token_id) for token_id in ids] + [stream.flush()]
        expected = pair.theirs.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert "".join(pieces) == expected
        assert "\ufffd" in expected or all("\ufffd" not in piece for piece in pieces)


def test_every_token_decodes_as_in_transformers(pair: Pair) -> None:
    rng = np.random.default_rng(23)
    tokenizer = pair.ours.tokenizer
    for token_id in rng.integers(0, tokenizer.vocab_size, 3000).tolist():
        expected = pair.theirs.decode([token_id], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        assert tokenizer.decode([token_id], skip_special_tokens=False) == expected


def test_conversations_render_the_same(pair: Pair) -> None:
    compared = 0
    for conversation in conversations():
        options = {
            "tools": conversation.get("tools"),
            "add_generation_prompt": conversation.get("add_generation_prompt", True),
            **conversation.get("variables", {}),
        }
        template = pair.ours.template
        assert template is not None
        try:
            expected = pair.theirs.apply_chat_template(conversation["messages"], tokenize=False, **options)
        except Exception:  # transformers refuses the conversation, and so must we
            with pytest.raises(RequestError):
                template.render(**conversation)
            continue
        assert template.render(**conversation).text == expected
        ids = pair.theirs.apply_chat_template(conversation["messages"], return_dict=False, **options)
        assert pair.ours.chat(**conversation).token_ids.tolist() == list(ids)
        compared += 1
    assert compared >= 5


def test_special_tokens_from_users_stay_text(pair: Pair) -> None:
    tokenizer = pair.ours.tokenizer
    plain = pair.ours.chat([{"role": "user", "content": "x"}]).token_ids.tolist()
    expected = [token_id for token_id in plain if token_id in tokenizer.special_ids]
    for text in [*hostile_texts(), *tokenizer.special_tokens[:40]]:
        ids = pair.ours.chat([{"role": "user", "content": text}]).token_ids.tolist()
        assert [token_id for token_id in ids if token_id in tokenizer.special_ids] == expected
        assert text.strip() in tokenizer.decode(ids, skip_special_tokens=False)
