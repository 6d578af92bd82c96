"""What a consumer gets of the engine's messages."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest
import tokenizers
import torch
from tokenizers import decoders, models

from saccade.client.output import Logprob
from saccade.client.stream import RequestStream
from saccade.execution.worker import gpu_bytes_in_use, gpu_bytes_reserved
from saccade.inputs.placeholders import Prompt
from saccade.inputs.processor import Processor
from saccade.inputs.text.chat_template import ChatTemplate
from saccade.inputs.text.special_tokens import GuardedTokens
from saccade.inputs.text.tokenizer import Tokenizer
from saccade.wire.messages import News
from saccade.wire.sampling_params import SamplingParams
from saccade.wire.update import Finish, FinishReason
from tests.server.fake import Caller, FakeEngine, service_for


def test_tokens_after_a_stop_string_are_dropped(processor: Processor) -> None:
    """Tokens that waited for a slow reader arrive together; those after the stop string are not part of the output."""
    tokenizer = processor.tokenizer
    ids = tuple(processor.text("one STOP two three").token_ids.tolist())
    stream = RequestStream(0, "r", processor.text("x"), SamplingParams(stop="STOP", max_tokens=99), tokenizer)
    news = [News("0", (token,), serial=0, index=0) for token in ids]
    for item in news:
        stream.put(item)
    [(delta, stop)] = list(stream.read(stream._inbox))
    assert stop == "STOP" and delta.text == "one " and delta.finish_reason == "stop"
    assert delta.token_ids == ids[: delta.num_output_tokens] and 0 < len(delta.token_ids) < len(ids)
    assert not list(stream.read([News("0", ids, finish=Finish(FinishReason.LENGTH), serial=0, index=0)])), (
        "it has ended"
    )


class TestFirstBlank:
    """Vocabularies that begin every text with a blank, which their decoders drop."""

    @pytest.fixture(params=["strip", "metaspace"])
    def blank(self, request: pytest.FixtureRequest) -> Processor:
        words = ["<unk>", "<s>", "[", "]", *(f"\u2581{word}" for word in ("The", "capital", "is", "Paris")), "\u2581"]
        made = tokenizers.Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, [], unk_token="<unk>"))
        made.add_special_tokens(["<unk>", "<s>"])
        steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        made.decoder = decoders.Sequence(steps) if request.param == "strip" else decoders.Metaspace()
        tokenizer = Tokenizer(made.to_str(), {"bos_token": "<s>"})
        template = ChatTemplate("{% for m in messages %}[{{ m.content }}{% endfor %}", GuardedTokens(["<s>"]))
        return Processor(tokenizer, template=template)

    @staticmethod
    def answer(blank: Processor, prompt: Prompt, token_ids: tuple[int, ...]) -> str:
        stream = RequestStream(0, "r", prompt, SamplingParams(), blank.tokenizer)
        [(delta, _)] = list(stream.read([News("0", token_ids, finish=Finish(FinishReason.LENGTH), serial=0, index=0)]))
        return delta.text

    def test_a_completion_joins_its_prompt(self, blank: Processor) -> None:
        prompt, more = [1, 4, 5, 6], (7, 6)
        decode = blank.tokenizer.decode
        joined = decode(prompt) + self.answer(blank, blank.tokens(prompt), more)
        assert joined == decode([*prompt, *more]) == "The capital is Paris is"
        assert self.answer(blank, blank.text("[]"), more) == " Paris is"

    def test_an_answer_starts_a_new_text(self, blank: Processor) -> None:
        talk = [{"role": "user", "content": "]"}]
        assert self.answer(blank, blank.chat(talk), (7, 6)) == "Paris is"
        assert self.answer(blank, blank.tokens([1]), (7, 6)) == "Paris is", "there is no text to continue"
        talk.append({"role": "assistant", "content": "]"})
        continued = blank.chat(talk, add_generation_prompt=False, continue_final_message=True)
        assert self.answer(blank, continued, (7, 6)) == " Paris is"

    @pytest.mark.parametrize("is_streamed", [False, True])
    @pytest.mark.parametrize(("prompt", "text"), [([1, 4, 5, 6], " Paris is"), ([1], "Paris is")])
    def test_offsets_count_the_blank(self, blank: Processor, prompt: list[int], text: str, is_streamed: bool) -> None:
        async def script(prompt: Prompt, params: SamplingParams) -> AsyncGenerator[dict[str, Any], None]:
            scores = tuple({token: Logprob(-1.0, 1)} for token in (7, 6))
            yield {"text": text, "token_ids": (7, 6), "logprobs": scores, "finish_reason": "length"}

        caller = Caller(service_for(FakeEngine(blank, script)))
        body = {"prompt": prompt, "logprobs": 0, "stream": is_streamed}
        answer = asyncio.run(caller.post("/v1/completions", body))
        [found, *_] = answer.events if is_streamed else [answer.json]
        assert found["choices"][0]["logprobs"]["text_offset"] == [0, text.index(" is")]


def test_memory_in_use_is_that_of_the_whole_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (30, 100))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 50)
    assert (gpu_bytes_in_use(), gpu_bytes_reserved()) == (70, 50)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    assert (gpu_bytes_in_use(), gpu_bytes_reserved()) == (0, 0)
