"""`LLM`: a model in this process, shaped like vLLM's."""

import logging
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, fields
from itertools import count
from pathlib import Path
from typing import Any

from rich.console import Console

from saccade.client.output import Logprobs, OutputStream, RequestOutput, place_prompt_scores
from saccade.errors import CapacityError, ConfigError
from saccade.execution.build import Built, build_engine
from saccade.execution.executor import DeviceExecutor
from saccade.inputs.placeholders import Prompt
from saccade.inputs.processor import Processor
from saccade.models.folder import find_folder
from saccade.offline.llm_inputs import list_params, list_prompts, list_talks, read_prompt
from saccade.scheduling.engine import Engine
from saccade.terminal import progress_bar
from saccade.wire.engine_metrics import Metric, counter, engine_metrics
from saccade.wire.engine_settings import EngineSettings, SchedulerSettings
from saccade.wire.sampling_params import SamplingParams
from saccade.wire.update import Update

MAX_IMPROVEMENTS = 4  # graphs captured behind a call; one takes some 50 ms
MAX_CHECKS = 8  # shadow checks behind a call

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Job:
    """A request on its way: its prompt and the streams of its outputs by id."""

    request_id: str
    prompt: Prompt
    streams: dict[str, OutputStream]
    prompt_logprobs: list[Logprobs | None] | None

    @property
    def is_finished(self) -> bool:
        return all(stream.output.finish_reason is not None for stream in self.streams.values())

    def output(self) -> RequestOutput:
        outputs = [stream.output for stream in self.streams.values()]
        return RequestOutput(self.request_id, self.prompt.token_ids.tolist(), outputs, self.prompt_logprobs)


@dataclass(slots=True)
class _Batch:
    """The requests of one call, and those of them that have ended."""

    jobs: list[_Job] = field(default_factory=list)
    by_id: dict[str, _Job] = field(default_factory=dict)  # by the id of each output
    num_finished: int = 0

    def add(self, job: _Job) -> None:
        self.jobs.append(job)
        self.by_id.update(dict.fromkeys(job.streams, job))


class LLM:
    """Generates in batches. Flags of the command line are keywords here: `LLM(model, max_model_len=4096)`.

    Close it, or use it as a context manager, to give its memory back.
    """

    def __init__(self, model: str | Path, **settings: Any) -> None:
        own = {each.name for each in fields(EngineSettings)}
        known = own | {each.name for each in fields(SchedulerSettings)}
        if unknown := settings.keys() - known:
            raise ConfigError(f"unknown setting {sorted(unknown)[0]!r}; known are {', '.join(sorted(known))}")
        engine = EngineSettings(**{name: value for name, value in settings.items() if name in own})
        limits = SchedulerSettings(**{name: value for name, value in settings.items() if name not in own})
        folder = find_folder(model, revision=engine.revision, download_dir=engine.download_dir)
        self.processor = Processor.from_folder(folder, chat_template=engine.chat_template)
        self._built: Built | None = build_engine(folder, engine, limits, processor=self.processor)
        self._ids = count()
        self._tokens: Counter[str] = Counter()
        self._ends: Counter[str] = Counter()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def engine(self) -> Engine:
        return self._open.engine

    @property
    def executor(self) -> DeviceExecutor:
        """The passes and graphs, for who looks at them without requests."""
        return self._open.executor

    @property
    def _open(self) -> Built:
        if self._built is None:
            raise ConfigError("this LLM is closed; make a new one")
        return self._built

    def close(self) -> None:
        """Free the device. A closed LLM cannot be used again."""
        if self._built is not None:
            self._built.close()
        self._built = None

    def generate(
        self,
        prompts: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = True,
    ) -> list[RequestOutput]:
        """Answers to prompts, in order. A prompt is text, token ids (numpy's and torch's, too), or {"prompt": text,
        "multi_modal_data": {"image": [...], "video": [...]}} with images and videos for the placeholders of the text;
        [{"image": ...}, {"video": ...}, {"image": ...}] names them in their order."""
        found = [read_prompt(prompt, self.processor) for prompt in list_prompts(prompts)]
        return self._run(found, sampling_params, progress)

    def chat(
        self,
        messages: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = True,
        **template: Any,
    ) -> list[RequestOutput]:
        """Answers to one conversation or several. Images and videos may be files (`str` or `Path`), bytes or data URLs,
        images also PIL images or arrays, videos also lists of frames."""
        found = [self.processor.chat(talk, **template) for talk in list_talks(messages)]
        return self._run(found, sampling_params, progress)

    def get_metrics(self) -> list[Metric]:
        """What this model did since it was loaded: requests, tokens, caches and graphs, as /metrics of a server tells
        them."""
        found = [counter("request_success", "requests that ended", n, finished_reason=r) for r, n in self._ends.items()]
        found.append(counter("prompt_tokens", "prompt tokens", self._tokens["prompt_tokens"]))
        found.append(counter("generation_tokens", "output tokens", self._tokens["generation_tokens"]))
        phases, ranks = self.engine.phase_snapshots().values(), self._open.tensor_parallel
        return [*found, *engine_metrics(self.engine.scheduler.stats(), phases, ranks)]

    def _run(
        self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None, progress: bool
    ) -> list[RequestOutput]:
        batch = _Batch()
        try:
            for prompt, wanted in zip(prompts, list_params(params, len(prompts)), strict=True):
                batch.add(self._add_when_possible(prompt, wanted, batch))
            self._finish(batch, progress)
        finally:  # whatever was raised, nothing stays behind for the next call
            for job in batch.jobs:
                self.engine.abort(job.request_id)
            while self.engine.has_work:
                self.engine.step()
        self._note(batch.jobs)
        self._improve()
        self._check_shadow()
        return [job.output() for job in batch.jobs]

    def _improve(self) -> None:
        """Capture graphs of layouts that came often, as a server does when it is idle: a few, the caller waits."""
        for _ in range(MAX_IMPROVEMENTS):
            if self.engine.can_improve and (error := self.engine.improve()) is not None:
                log.warning("a graph could not be captured: %s: %s", type(error).__name__, error)

    def _check_shadow(self) -> None:
        """Check some of the replays that were kept: there is nobody to do it while this thread is elsewhere."""
        for _ in range(MAX_CHECKS):
            found = self.engine.check_shadow() if self.engine.can_check else None
            if found is not None:
                log.error("%s", found)

    def _note(self, jobs: Sequence[_Job]) -> None:
        for job in jobs:
            self._tokens["prompt_tokens"] += len(job.prompt)
            for stream in job.streams.values():
                self._tokens["generation_tokens"] += len(stream.output.token_ids)
                self._ends[str(stream.output.finish_reason)] += 1

    def _add_when_possible(self, prompt: Prompt, params: SamplingParams, batch: _Batch) -> _Job:
        """The queue may be full of this very call's requests: then go on with those first."""
        while True:
            try:
                return self._add(prompt, params)
            except CapacityError:
                if not self.engine.has_work:
                    raise
            self._step(batch)

    def _finish(self, batch: _Batch, progress: bool) -> None:
        with ExitStack() as stack:
            bar = stack.enter_context(progress_bar(Console(stderr=True))) if progress else None
            task = bar.add_task("generating", total=len(batch.jobs)) if bar else None
            while self.engine.has_work:
                self._step(batch)
                if bar and task is not None:
                    bar.update(task, completed=batch.num_finished)

    def _step(self, batch: _Batch) -> None:
        for update in self.engine.step():
            self._take(update, batch)

    def _add(self, prompt: Prompt, params: SamplingParams) -> _Job:
        request_id = f"request-{next(self._ids)}"
        ids = self.engine.add(request_id, prompt, params)
        streams = {
            member: OutputStream(
                index,
                self.processor.tokenizer.detokenizer(
                    skip_special_tokens=params.skip_special_tokens, is_continued=prompt.is_continued
                ),
                params,
            )
            for index, member in enumerate(ids)
        }
        scores: list[Logprobs | None] | None = [None] * len(prompt) if params.prompt_logprobs is not None else None
        return _Job(request_id, prompt, streams, scores)

    def _take(self, update: Update, batch: _Batch) -> None:
        job = batch.by_id[update.request_id]
        if update.prompt_scores is not None and job.prompt_logprobs is not None:
            place_prompt_scores(job.prompt_logprobs, job.prompt.token_ids, update.prompt_scores)
        stream = job.streams[update.request_id]
        if stream.output.finish_reason is not None:
            return
        _, stop = stream.take(update)
        if stop is not None and update.finish is None:
            self.engine.stop(update.request_id, stop)
        if stop is not None or update.finish is not None:
            batch.num_finished += job.is_finished
