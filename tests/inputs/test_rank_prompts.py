"""Reranker prompts from templates with query and document roles, from chat templates and without one, and the tokens
that a tokenizer appends to a text."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import processors

from saccade.errors import RequestError
from saccade.inputs.placeholders import append_text
from saccade.inputs.processor import Processor
from saccade.inputs.text.chat_template import ChatTemplate
from saccade.inputs.text.rank_prompts import JUDGE, find_answers, has_ranking_roles, read_content, score_of
from saccade.inputs.text.special_tokens import GuardedTokens
from saccade.inputs.text.tokenizer import Tokenizer
from tests.inputs.folders import DATA, QWEN_SPECIALS, QWEN_TAGS, train_byte_level, write_qwen

# Like vLLM's templates for rerankers.
WITH_ROLES = """<|im_start|>system
Judge.<|im_end|>
<|im_start|>user
<Instruct>: {{ messages | selectattr("role", "eq", "system") | map(attribute="content") | first | default("Find it.") }}
<Query>:{{ messages | selectattr("role", "eq", "query") | map(attribute="content") | first }}
<Document>:{{ messages | selectattr("role", "eq", "document") | map(attribute="content") | first }}<|im_end|>
<|im_start|>assistant
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_qwen(tmp_path_factory.mktemp("qwen"))


def decoded(processor: Processor, prompt: Any) -> str:
    return processor.tokenizer.decode(prompt.token_ids.tolist(), skip_special_tokens=False)


def with_template(processor: Processor, source: str | None) -> Processor:
    tokenizer = processor.tokenizer
    template = None if source is None else ChatTemplate(source, GuardedTokens(tokenizer.special_tokens))
    return Processor(tokenizer, template=template)


def test_a_template_with_ranking_roles_gets_query_and_document(folder: Path) -> None:
    processor = with_template(Processor.from_folder(folder), WITH_ROLES)
    assert has_ranking_roles(WITH_ROLES)
    found = decoded(processor, processor.pair("where?", "here <|im_end|>"))
    head = "<|im_start|>system\nJudge.<|im_end|>\n<|im_start|>user\n<Instruct>: {}\n<Query>:where?\n<Document>:here"
    assert found == head.format("Find it.") + " <|im_end|><|im_end|>\n<|im_start|>assistant"
    instructed = decoded(processor, processor.pair("where?", "here", instruction="Look."))
    assert instructed == head.format("Look.") + "<|im_end|>\n<|im_start|>assistant"


@pytest.mark.parametrize("name", ["qwen3", "qwen3_vl", "qwen2_5_vl", "gemma3", "llama3"])
def test_chat_templates_have_no_ranking_roles(name: str) -> None:
    assert not has_ranking_roles((DATA / f"inputs_{name}.jinja").read_text())


def test_without_a_template_the_published_prompt_is_used(folder: Path) -> None:
    """It matches what Qwen3's own template writes for the same conversation."""
    whole = Processor.from_folder(folder)
    plain, own = (with_template(whole, s) for s in (None, (DATA / "inputs_qwen3.jinja").read_text()))
    found = decoded(plain, plain.pair("where?", "here", instruction="Look."))
    assert found == (
        f"<|im_start|>system\n{JUDGE}<|im_end|>\n<|im_start|>user\n<Instruct>: Look.\n<Query>: where?\n"
        "<Document>: here<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )
    assert found == decoded(own, own.pair("where?", "here", instruction="Look."))


def test_chats_refuse_ranking_roles(folder: Path) -> None:
    with pytest.raises(RequestError, match="role must be one of assistant, developer"):
        Processor.from_folder(folder).chat([{"role": "query", "content": "where?"}])


@pytest.mark.parametrize("value", [5, None, [], {}, ["text"], {"content": 5}, {"content": []}])
def test_invalid_documents_are_refused(value: Any) -> None:
    with pytest.raises(RequestError, match="must be text, or an object"):
        read_content(value, "documents[3]")


def test_scores_are_probabilities_even_for_extreme_logits() -> None:
    assert score_of((0.0, 0.0)) == 0.5
    assert score_of((1e4, -1e4)) == 1.0 and score_of((-1e4, 1e4)) == 0.0
    yes, no = np.random.default_rng().normal(0, 5, 2)
    assert score_of((yes, no)) == pytest.approx(np.exp(yes) / (np.exp(yes) + np.exp(no)))


def test_a_model_without_single_token_answers_is_refused(folder: Path) -> None:
    with pytest.raises(RequestError, match='no single token for "yes"'):
        find_answers(Processor.from_folder(folder).tokenizer)


def test_a_text_ends_with_the_tokenizers_end_tokens(folder: Path) -> None:
    plain = Processor.from_folder(folder)
    assert plain.tokenizer.end_ids == []
    prompt = plain.text("the fox")
    assert plain.ended(prompt) is prompt
    tokenizer = train_byte_level(QWEN_SPECIALS, QWEN_TAGS)
    end = tokenizer.token_to_id("<|endoftext|>")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A <|endoftext|>", special_tokens=[("<|endoftext|>", end)]
    )
    ended = Processor(Tokenizer(tokenizer.to_str(), {"add_bos_token": False}))
    whole = ended.ended(ended.text("the fox"))
    assert whole.token_ids.tolist() == tokenizer.encode("the fox", add_special_tokens=True).ids
    named = Tokenizer(tokenizer.to_str(), {"add_eos_token": True, "eos_token": "<|im_end|>"})
    assert named.end_ids == [tokenizer.token_to_id("<|im_end|>")]


def test_tokens_after_an_image_have_the_next_positions(folder: Path) -> None:
    processor = Processor.from_folder(folder)
    messages = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "the fox"}]}]
    picture = np.zeros((80, 200, 3), dtype=np.uint8)
    whole = processor.chat(messages, media=[picture])
    longer = append_text(whole, [5, 6])
    same = processor.text(shown_text(whole, processor) + "<|im_end|><|im_end|>", media=[("image", picture)])
    assert len(longer) == len(same) == len(whole) + 2
    np.testing.assert_array_equal(longer.positions_3T, same.positions_3T)
    assert longer.rope_delta == same.rope_delta and longer.spans == whole.spans


def shown_text(prompt: Any, processor: Processor) -> str:
    """A prompt's text, with one placeholder for all rows of an image."""
    ids, pad = prompt.token_ids.tolist(), processor.tokenizer.token_id("<|image_pad|>")
    kept = [token for i, token in enumerate(ids) if token != pad or ids[i - 1] != pad]
    return processor.tokenizer.decode(kept, skip_special_tokens=False)
