"""What the engine sends, as its consumer gets it."""

import pytest
import torch

from saccade.engine.messages import News
from saccade.engine.params import SamplingParams
from saccade.engine.request import Finish, FinishReason
from saccade.engine.stream import RequestStream
from saccade.engine.worker import gpu_bytes_in_use
from saccade.inputs.processor import Processor


def test_tokens_behind_a_stop_string_are_nobodys(processor: Processor) -> None:
    """Tokens that waited for a slow reader come together; those behind the stop string are not of the output."""
    tokenizer = processor.tokenizer
    ids = tuple(processor.text("one STOP two three").token_ids.tolist())
    stream = RequestStream(0, "r", processor.text("x"), SamplingParams(stop="STOP", max_tokens=99), tokenizer)
    news = [News(0, 0, (token,), 0) for token in ids]
    for item in news:
        stream.put(item)
    [(delta, stop)] = list(stream.read(stream._inbox))
    assert stop == "STOP" and delta.text == "one " and delta.finish_reason == "stop"
    assert delta.token_ids == ids[: delta.num_output_tokens] and 0 < len(delta.token_ids) < len(ids)
    assert not list(stream.read([News(0, 0, ids, 0, Finish(FinishReason.LENGTH))])), "it has ended"


def test_memory_in_use_is_that_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (30, 100))
    assert gpu_bytes_in_use() == 70
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    assert gpu_bytes_in_use() == 0
