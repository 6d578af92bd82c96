"""`saccade run`: streams the answer to one question, or starts a conversation if there is none."""

import sys
from argparse import Namespace
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from saccade import bundled
from saccade.cli.aliases import add_aliases
from saccade.cli.conversation import TerminalChat, history
from saccade.cli.model import chosen_model, found_path, looks_like_model
from saccade.cli.parser import Parser, settings_from
from saccade.cli.prompt_parts import Part, fetched, file_part, image_part, parts_of
from saccade.config import history_file, setting
from saccade.errors import ConfigError
from saccade.wire.engine_settings import EngineSettings, SchedulerSettings

if TYPE_CHECKING:
    from saccade.offline.llm import LLM
    from saccade.wire.sampling_params import SamplingParams

EXIT_FAILED = 1
REQUEST_ID = "run"


@dataclass(frozen=True, kw_only=True, slots=True)
class AnswerSettings:
    """How `saccade run` answers."""

    max_tokens: int = setting(256, "longest answer in tokens")
    temperature: float = setting(0.0, "0 takes the likeliest token every time")


class AnswerStoppedError(KeyboardInterrupt):
    """The user stopped an answer; `text` is what had been generated."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text = text


def new_parser(name: str) -> Parser:
    about = (
        "Ask a model one question. Paths and URLs of images inside the prompt are attached as images. Without MODEL, "
        "the model that comes with the package answers. Without PROMPT, the prompt is read from a pipe, or a "
        "conversation starts. To start fast, no graphs are captured and nothing is warmed up; change that with "
        "--no-enforce-eager and --warm-up."
    )
    parser = Parser(name, words="[MODEL] [PROMPT]", max_words=2, about=about)
    media = parser.new_group("media", "images and videos for the prompt")
    shared: dict[str, Any] = {"dest": "media", "action": "append", "metavar": "FILE"}  # one list keeps their order
    named = " (--image, --video)"
    media.add("--image", type=_image, help="an image: a file or a URL; repeatable", **shared)
    media.add("--video", type=partial(file_part, "video", flags=named), help="a video file; repeatable", **shared)
    parser.add_settings(AnswerSettings)
    parser.add_settings(EngineSettings, enforce_eager=True, warm_up=False)
    parser.add_settings(SchedulerSettings, max_num_seqs=1)
    add_aliases(parser)
    return parser


def run(flags: Namespace) -> int:
    model, prompt = _model_and_prompt(flags.words, getattr(flags, "model", ""))
    content: list[Part] = getattr(flags, "media", [])
    first = fetched(content + parts_of(prompt)) if prompt.strip() else None
    if first is None and not sys.stdin.isatty():
        raise ConfigError("no prompt was given: saccade run [MODEL] PROMPT")
    answer = settings_from(flags, AnswerSettings)
    llm = _load(model, flags)
    from saccade import SamplingParams

    params = SamplingParams(max_tokens=answer.max_tokens, temperature=answer.temperature)
    with llm:
        if not first:
            return _talk(llm, content, params)
        _, is_right = _stream(llm, [{"role": "user", "content": first}], params)
        return 0 if is_right else EXIT_FAILED


def _image(word: str) -> Part:
    try:
        return image_part(word)
    except ConfigError as error:
        raise ConfigError(f"{error} (--image, --video)") from None


def _model_and_prompt(words: list[str], configured: str) -> tuple[str, str]:
    """`configured` is the model named by --model or the config file, if any."""
    if len(words) == 2:
        return words[0], words[1]
    if words and words[0] != configured and not looks_like_model(words[0]):
        return configured or chosen_model(()), words[0]
    piped = "" if sys.stdin is None or sys.stdin.isatty() else sys.stdin.read().strip()
    return chosen_model(words), piped


def _load(model: str, flags: Namespace) -> "LLM":
    is_bundled = Path(model) == bundled.path()
    own = {**bundled.LIMITS, "max_num_seqs": 1} if is_bundled else {}
    engine, limits = settings_from(flags, EngineSettings, own), settings_from(flags, SchedulerSettings, own)
    with Console(stderr=True).status(f"loading {'the bundled model' if is_bundled else model}"):
        from saccade import LLM  # imports torch: a second or two
        from saccade.execution.build import limit_threads

        if found_path(model) is not None:
            limit_threads(model)
        return LLM(model, **asdict(engine), **asdict(limits))


def _talk(llm: "LLM", content: list[Part], params: "SamplingParams") -> int:
    def answer(messages: list[dict[str, Any]]) -> str:
        try:
            return _stream(llm, messages, params)[0]
        except AnswerStoppedError as stopped:
            return stopped.text

    sys.stderr.write("/help lists the commands\n")
    with history(history_file()):
        TerminalChat(answer, content).run()
    return 0


def _stream(llm: "LLM", messages: list[dict[str, Any]], params: "SamplingParams") -> tuple[str, bool]:
    """Writes an answer as it is generated, and any error. Returns the text and whether it succeeded. Ctrl-C stops the
    answer and raises `AnswerStoppedError`."""
    from saccade.client.output import OutputStream
    from saccade.offline.llm_inputs import read_conversation

    engine, tokenizer = llm.engine, llm.processor.tokenizer
    stream = OutputStream(0, tokenizer.detokenizer(skip_special_tokens=True), params)
    console = Console(stderr=True)
    try:
        with console.status("reading the question") as status:
            engine.add(REQUEST_ID, read_conversation(messages, llm.processor), params)
            while engine.has_work:
                for update in engine.step():
                    text, _ = stream.take(update)
                    if text:
                        status.stop()  # the spinner would overwrite the answer's line
                    sys.stdout.write(text)
                    sys.stdout.flush()
    except KeyboardInterrupt:
        sys.stdout.write("\n")
        sys.stderr.write("(stopped)\n")
        raise AnswerStoppedError(stream.output.text) from None
    finally:
        engine.abort(REQUEST_ID)
        while engine.has_work:
            engine.step()
    sys.stdout.write("\n")
    sys.stdout.flush()
    is_right = stream.output.finish_reason != "error"
    if not is_right:
        sys.stderr.write(f"saccade: {stream.output.stop_reason}\n")
    return stream.output.text, is_right
