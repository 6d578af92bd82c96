"""From a checkpoint to an open service, without a real engine."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from saccade.client.process import AsyncEngine
from saccade.errors import ConfigError
from saccade.inputs.processor import Processor
from saccade.server import lifecycle
from saccade.server.lifecycle import Launch, Stages, start
from saccade.server.service import ServerPhase
from saccade.wire.engine_settings import EngineSettings, SchedulerSettings
from tests.inputs.folders import write_qwen
from tests.server.fake import FakeEngine, service_for

TALK = [{"role": "user", "content": "a"}]


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[EngineSettings]:
    """The settings of every engine started."""
    seen: list[EngineSettings] = []

    async def fake(folder: Path, settings: EngineSettings, limits: SchedulerSettings, **how: Any) -> FakeEngine:
        seen.append(settings)
        return FakeEngine(how["processor"])

    monkeypatch.setattr(AsyncEngine, "start", fake)
    return seen


def test_a_template_file_is_used_and_changes_the_fingerprint(begun: list[EngineSettings], tmp_path: Path) -> None:
    folder, file = write_qwen(tmp_path / "model"), tmp_path / "other.jinja"
    plan = Launch(str(folder))
    own = replace(plan, engine=EngineSettings(chat_template=str(file)))

    def opened(chosen: Launch) -> tuple[str, str]:
        service = service_for(None)
        engine = asyncio.run(start(service, chosen, Stages(lambda text: None, "", 0.0)))
        template = engine.processor.template
        assert template is not None
        return template.render(TALK).text, service.fingerprint

    first = opened(plan)
    found = []
    for text in ("<{{ messages[0].content }}>", "[{{ messages[0].content }}]"):
        file.write_text(text)
        found.append(opened(own))
    assert [text for text, _ in found] == ["<a>", "[a]"] and first[0] not in ("<a>", "[a]")
    assert len({fingerprint for _, fingerprint in (first, *found)}) == 3


def test_an_engine_that_starts_again_finds_the_processes_for_media(begun: list[EngineSettings], tmp_path: Path) -> None:
    plan, service = Launch(str(write_qwen(tmp_path / "model"))), service_for(None)

    async def run() -> None:
        pools = []
        for _ in range(2):
            engine = await start(service, plan, Stages(lambda text: None, "", 0.0))
            pools.append(engine.processor.pool)
        await service.aclose()
        assert pools[0] is pools[1] is service.media_pool is not None

    asyncio.run(run())
    assert len(begun) == 2


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("config.json", {"rope_theta": 7.0}),
        ("hf_quant_config.json", {"quantization": {"quant_algo": "FP8"}}),
        ("preprocessor_config.json", {"image_mean": [0.25, 0.5, 0.75]}),
        ("generation_config.json", {"temperature": 0.125}),
    ],
)
def test_files_that_answers_depend_on_change_the_fingerprint(
    name: str, change: dict[str, Any], begun: list[EngineSettings], tmp_path: Path
) -> None:
    folder = write_qwen(tmp_path / "model")
    plan = Launch(str(folder))

    def fingerprint() -> str:
        service = service_for(None)
        asyncio.run(start(service, plan, Stages(lambda text: None, "", 0.0)))
        return service.fingerprint

    first, same, file = fingerprint(), fingerprint(), folder / name
    file.write_text(json.dumps((json.loads(file.read_text()) if file.exists() else {}) | change))
    assert first == same != fingerprint()


@pytest.mark.parametrize("source", ["auto", "none"])
def test_sampling_defaults_that_no_request_may_have_are_left_out_at_the_start(
    source: str, begun: list[EngineSettings], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Otherwise every request without values of its own would be refused."""
    folder = write_qwen(tmp_path / "model")
    wrong = {"temperature": -1, "top_p": 1.5, "top_k": -5, "min_p": 2, "repetition_penalty": 0}
    (folder / "generation_config.json").write_text(json.dumps(wrong))
    service = service_for(None, generation_config=source)
    asyncio.run(start(service, Launch(str(folder)), Stages(lambda text: None, "", 0.0)))
    if source == "none":
        assert service.defaults is None and not caplog.messages
        return
    assert service.defaults is not None and all(getattr(service.defaults, name) is None for name in wrong)
    said = [message.removeprefix("generation_config.json: ").partition(";")[0] for message in caplog.messages]
    assert sorted(said) == sorted(f"{name} is {value}" for name, value in wrong.items())


def test_tables_that_only_some_texts_need_are_built_at_startup(
    begun: list[EngineSettings], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a large vocabulary that takes most of a second and blocks everything else."""
    plan = Launch(str(write_qwen(tmp_path / "model")))
    engine = asyncio.run(start(service_for(None), plan, Stages(lambda text: None, "", 0.0)))
    tokenizer = engine.processor.tokenizer
    monkeypatch.setattr("saccade.inputs.text.tokenizer.tokenizers", None)
    assert tokenizer.encode_plain("a<|im_end|>") and not tokenizer.could_fit(10**9, 1)
    assert "_longest" in vars(tokenizer)


def test_a_revision_is_resolved_once_and_the_engine_gets_its_folder(
    begun: list[EngineSettings], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_qwen(tmp_path / "model")
    asked: list[tuple[str, str]] = []

    def find(model: str, *, revision: str, download_dir: str) -> Path:
        asked.append((model, revision))
        return folder

    monkeypatch.setattr(lifecycle, "find_model", find)
    plan = Launch("org/name", EngineSettings(revision="v2"))
    asyncio.run(start(service_for(None), plan, Stages(lambda text: None, "", 0.0)))
    assert asked == [("org/name", "v2")] and [settings.revision for settings in begun] == [""]


def test_a_missing_template_file_stops_the_start(begun: list[EngineSettings], tmp_path: Path) -> None:
    folder = write_qwen(tmp_path / "model")
    plan = Launch(str(folder), EngineSettings(chat_template="gone.jinja"))
    with pytest.raises(ConfigError, match=r"chat_template is gone\.jinja, which is not a file"):
        asyncio.run(start(service_for(None), plan, Stages(lambda text: None, "", 0.0)))
    assert not begun


def test_a_config_that_breaks_while_an_engine_starts_leaves_no_engine_behind(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder, made = write_qwen(tmp_path / "model"), list[FakeEngine]()

    async def starts(*given: Any, processor: Processor, **how: Any) -> FakeEngine:
        (folder / "config.json").write_text("{")
        made.append(FakeEngine(processor))
        return made[0]

    monkeypatch.setattr(AsyncEngine, "start", starts)
    service = service_for(None)
    engine = asyncio.run(start(service, Launch(str(folder)), Stages(lambda text: None, "", 0.0)))
    assert engine is made[0] and service.phase is ServerPhase.READY
