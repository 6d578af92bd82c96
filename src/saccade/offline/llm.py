"""`LLM`: a model in this process, with vLLM's interface."""

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields
from itertools import count
from os import PathLike, fspath
from pathlib import Path
from threading import RLock
from typing import Any, TypeVar

from numpy.typing import NDArray
from rich.console import Console
from rich.progress import Progress

from saccade.client.output import RequestOutput, RequestOutputs
from saccade.errors import CapacityError, ConfigError, SaccadeError
from saccade.execution.build import Built, build_engine
from saccade.execution.executor import DeviceExecutor
from saccade.inputs.placeholders import Prompt
from saccade.inputs.processor import Processor
from saccade.inputs.text.embedding import EmbeddingSettings
from saccade.inputs.text.rank_prompts import find_answers, score_of
from saccade.kernels.dispatch import as_current
from saccade.models.folder import find_model
from saccade.offline.llm_inputs import (
    list_conversations,
    list_params,
    list_prompts,
    naming_prompt,
    read_conversation,
    read_media_limits,
    read_prompt,
    read_template_options,
)
from saccade.offline.llm_pooling import (
    EmbeddingOutput,
    PoolingRequestOutput,
    RankedDocument,
    ScoringOutput,
    check_ranking,
    read_embedded,
    read_pairs,
)
from saccade.offline.prompt_reader import PromptReader
from saccade.scheduling.engine import Engine
from saccade.terminal import progress_bar
from saccade.wire.engine_metrics import Metric, counter, own_metrics, scheduler_metrics
from saccade.wire.engine_settings import EngineSettings, SchedulerSettings
from saccade.wire.sampling_params import SamplingParams

MAX_IMPROVEMENTS = 4  # graphs captured after a call; one takes about 50 ms
MAX_CHECKS = 8  # shadow checks after a call

T = TypeVar("T")

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Batch:
    requests: dict[str, RequestOutputs] = field(default_factory=dict)
    by_id: dict[str, tuple[RequestOutputs, int]] = field(default_factory=dict)
    num_finished: int = 0


class LLM:
    """Generates in batches. Takes the command line's flags as keywords: `LLM(model, max_model_len=4096)`. Close it, or
    use it as a context manager, to free its memory. Calls of several threads run one after the other."""

    def __init__(self, model: str | Path, **settings: Any) -> None:
        """`limit_mm_per_prompt` is the most images and videos of a prompt: {"image": 128, "video": 16} if unset."""
        media = read_media_limits(settings.pop("limit_mm_per_prompt", None))
        own = {each.name for each in fields(EngineSettings)}
        known = own | {each.name for each in fields(SchedulerSettings)}
        if unknown := settings.keys() - known:
            raise ConfigError(f"unknown setting {sorted(unknown)[0]!r}; known settings are {', '.join(sorted(known))}")
        settings = {name: fspath(value) if isinstance(value, PathLike) else value for name, value in settings.items()}
        engine = EngineSettings(**{name: value for name, value in settings.items() if name in own})
        limits = SchedulerSettings(**{name: value for name, value in settings.items() if name not in own})
        folder = find_model(model, revision=engine.revision, download_dir=engine.download_dir)
        self.processor = Processor.from_folder(folder, limits=media, chat_template=engine.chat_template)
        self._embedding = EmbeddingSettings.from_folder(folder, engine.pooling)
        self._built: Built | None = build_engine(folder, engine, limits, processor=self.processor)
        self._turn = RLock()  # a step hands the updates of all requests to the one call that makes it
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
        """For code that runs passes and graphs without requests."""
        return self._open.executor

    @property
    def _open(self) -> Built:
        if self._built is None:
            raise ConfigError("this LLM is closed; make a new one")
        return self._built

    def close(self) -> None:
        """Frees the device. A closed LLM cannot be used again."""
        with self._turn:
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
        """Answers prompts, in order. A prompt is text, token ids (a list, or an array of numpy or torch), or {"prompt":
        text, "multi_modal_data": {"image": [...], "video": [...]}} with media for the text's placeholders. A list such
        as [{"image": ...}, {"video": ...}, {"image": ...}] gives media in order."""
        reader = PromptReader(list_prompts(prompts), lambda prompt: read_prompt(prompt, self.processor))
        return self._answer(reader, sampling_params, progress)

    def chat(
        self,
        messages: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = True,
        **template: Any,
    ) -> list[RequestOutput]:
        """Answers one or several conversations. Images and videos may be files (`str` or `Path`), bytes or data URLs.
        Images may also be PIL images or arrays, and videos lists of frames. `template` may have `tools`,
        `add_generation_prompt`, `continue_final_message` and `chat_template_kwargs`."""
        options = read_template_options(template, "chat")
        talks = list_conversations(messages)
        reader = PromptReader(talks, lambda talk: read_conversation(talk, self.processor, **options))
        return self._answer(reader, sampling_params, progress)

    def embed(
        self,
        prompts: Any,
        *,
        pooling: str | None = None,
        normalize: bool = True,
        dimensions: int | None = None,
        progress: bool = True,
        **template: Any,
    ) -> list[PoolingRequestOutput[EmbeddingOutput]]:
        """Vectors of prompts (see `generate`) or conversations (see `chat`), in order: the last hidden state or the
        mean of all, cut to `dimensions`, and scaled to length 1 if `normalize`."""
        options = read_template_options(template, "embed")
        settings = self._embedding
        settings.check_dimensions(dimensions)
        params = SamplingParams(max_tokens=0, pooling=settings.choose_pooling(pooling))

        def finish(vector: NDArray[Any]) -> EmbeddingOutput:
            return EmbeddingOutput(settings.finish(vector, dimensions=dimensions, normalize=normalize).tolist())

        return self._pool(read_embedded(prompts, self.processor, **options), params, finish, progress)

    def score(
        self, text_1: Any, text_2: Any, *, instruction: str | None = None, progress: bool = True
    ) -> list[PoolingRequestOutput[ScoringOutput]]:
        """How well documents (`text_2`) fit one query, or one query each (`text_1`): the probability that the model
        says yes rather than no. Each is text, or an object with `text`, `image` and `video`."""
        answers = find_answers(self.processor.tokenizer)
        params = SamplingParams(max_tokens=0, pooling="logits", pooled_token_ids=answers)
        pairs = read_pairs(text_1, text_2)
        reader = PromptReader(pairs, lambda pair: self.processor.pair(*pair, instruction=instruction))
        return self._pool(reader, params, lambda logits: ScoringOutput(score_of(logits)), progress)

    def rerank(
        self,
        query: Any,
        documents: Any,
        *,
        top_n: int | None = None,
        instruction: str | None = None,
        progress: bool = True,
    ) -> list[RankedDocument]:
        """Ranks documents (see `score`) by how well they fit one query, best first."""
        check_ranking(query, top_n)
        found = self.score(query, documents, instruction=instruction, progress=progress)
        ranked = [RankedDocument(i, one.outputs.score) for i, one in enumerate(found)]
        return sorted(ranked, key=lambda one: (-one.relevance_score, one.index))[:top_n]

    def get_metrics(self) -> list[Metric]:
        """Metrics of requests, tokens, caches and graphs since the model was loaded, as in a server's /metrics."""
        found = [counter("request_success", "requests that ended", n, finished_reason=r) for r, n in self._ends.items()]
        found.append(counter("prompt_tokens", "prompt tokens", self._tokens["prompt_tokens"]))
        found.append(counter("generation_tokens", "output tokens", self._tokens["generation_tokens"]))
        phases, stats = self.engine.phase_snapshots().values(), self.engine.scheduler.stats()
        return [*found, *scheduler_metrics(stats), *own_metrics(stats, phases, self._open.tensor_parallel)]

    def _pool(
        self,
        reader: PromptReader[Any],
        params: SamplingParams,
        finish: Callable[[NDArray[Any]], T],
        progress: bool,
    ) -> list[PoolingRequestOutput[T]]:
        found = []
        for request_id, made in self._run(reader, params, progress).items():
            if made.pooled is None:
                raise SaccadeError(f"{request_id} has no vector: {made.streams[0].output.stop_reason}")
            found.append(PoolingRequestOutput(request_id, made.prompt_ids.tolist(), finish(made.pooled)))
        return found

    def _answer(
        self, reader: PromptReader[Any], params: SamplingParams | Sequence[SamplingParams] | None, progress: bool
    ) -> list[RequestOutput]:
        return [
            RequestOutput(name, made.prompt_ids.tolist(), [each.output for each in made.streams], made.prompt_logprobs)
            for name, made in self._run(reader, params, progress).items()
        ]

    def _run(
        self, reader: PromptReader[Any], params: SamplingParams | Sequence[SamplingParams] | None, progress: bool
    ) -> dict[str, RequestOutputs]:
        chosen, batch = list_params(params, len(reader)), _Batch()
        with reader, progress_bar(Console(stderr=True) if progress else None) as bar:
            reader.read_all(bar)
            with self._turn, as_current(self.executor.device):
                try:
                    self._run_all(reader, chosen, bar, batch)
                finally:  # whatever was raised, the next call starts clean
                    for request_id in batch.requests:
                        self.engine.abort(request_id)
                    while self.engine.has_work:
                        self.engine.step()
                self._note(batch.requests.values())
                self._improve()
                self._check_shadow()
        return batch.requests

    def _run_all(
        self, reader: PromptReader[Any], params: Sequence[SamplingParams], bar: Progress, batch: _Batch
    ) -> None:
        task = bar.add_task("generating", total=len(reader))
        for i, (prompt, wanted) in enumerate(zip(reader, params, strict=True)):
            with naming_prompt(i, len(reader)):
                self._add_when_possible(prompt, wanted, batch)
            bar.update(task, completed=batch.num_finished)
        while self.engine.has_work:
            self._step(batch)
            bar.update(task, completed=batch.num_finished)
        self.engine.scheduler.check()

    def _improve(self) -> None:
        """Captures graphs of frequent layouts, as an idle server does, but only a few because the caller waits."""
        for _ in range(MAX_IMPROVEMENTS):
            if self.engine.idle.can_capture and (error := self.engine.idle.capture_next()) is not None:
                log.warning("a graph could not be captured: %s: %s", type(error).__name__, error)

    def _check_shadow(self) -> None:
        """Checks some of the recorded replays, because nothing checks them between calls."""
        for _ in range(MAX_CHECKS):
            found = self.engine.idle.check() if self.engine.idle.can_check else None
            if found is not None:
                log.error("%s", found)

    def _note(self, found: Iterable[RequestOutputs]) -> None:
        for request in found:
            self._tokens["prompt_tokens"] += len(request.prompt_ids)
            for stream in request.streams:
                self._tokens["generation_tokens"] += len(stream.output.token_ids)
                self._ends[str(stream.output.finish_reason)] += 1

    def _add_when_possible(self, prompt: Prompt, params: SamplingParams, batch: _Batch) -> None:
        """Adds a request. While the queue is full of this call's own requests, runs those."""
        while True:
            try:
                self._add(prompt, params, batch)
            except CapacityError:
                if not self.engine.has_work:
                    raise
                self._step(batch)
            else:
                return

    def _step(self, batch: _Batch) -> None:
        for update in self.engine.step():
            made, index = batch.by_id[update.request_id]
            taken = made.take(index, update)
            if taken is None:
                continue
            if taken[1] is not None:
                self.engine.stop(update.request_id, taken[1])
            if made.streams[index].output.finish_reason is not None:
                batch.num_finished += made.is_done

    def _add(self, prompt: Prompt, params: SamplingParams, batch: _Batch) -> None:
        request_id = f"request-{next(self._ids)}"
        ids = self.engine.add(request_id, prompt, params)
        batch.requests[request_id] = made = RequestOutputs(prompt, params, self.processor.tokenizer)
        batch.by_id |= {member: (made, index) for index, member in enumerate(ids)}
