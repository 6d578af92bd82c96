from collections.abc import Callable
from typing import Any

import pytest

from saccade.inputs.processor import Processor
from saccade.server.service import Service
from tests.inputs.folders import write_qwen
from tests.server.fake import Caller, FakeEngine, Script, service_for, two_words

OPENING = """
{%- if add_generation_prompt %}{{- '<think>\\n' }}
    {%- if enable_thinking is defined and not enable_thinking %}{{- '\\n</think>\\n\\n' }}{% endif %}
{%- endif %}"""


@pytest.fixture(scope="session")
def processor(tmp_path_factory: pytest.TempPathFactory) -> Processor:
    return Processor.from_folder(write_qwen(tmp_path_factory.mktemp("qwen")))


@pytest.fixture(scope="session")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Processor:
    """A checkpoint whose template opens a reasoning block, and closes it when thinking is off."""
    folder = write_qwen(tmp_path_factory.mktemp("thinker"))
    template = folder / "chat_template.jinja"
    template.write_text(template.read_text().rstrip("\n") + OPENING)
    return Processor.from_folder(folder)


@pytest.fixture
def engine(processor: Processor) -> FakeEngine:
    return FakeEngine(processor)


@pytest.fixture
def scripted(processor: Processor) -> Callable[..., tuple[Caller, FakeEngine, Service]]:
    """An app around an engine that follows a script."""

    def make(script: Script = two_words, **settings: Any) -> tuple[Caller, FakeEngine, Service]:
        made = FakeEngine(processor, script)
        service = service_for(made, **settings)
        return Caller(service), made, service

    return make
