"""Flags of vLLM and SGLang: mapped, taken with a line that says what happens instead, or refused with a reason."""

import shlex
from pathlib import Path
from typing import Any

import pytest

from saccade.cli import main
from saccade.cli.aliases import (
    BENCH_IGNORED_SWITCHES,
    BENCH_IGNORED_VALUES,
    BENCH_REFUSED,
    BUDGETS,
    IGNORED_SWITCHES,
    IGNORED_VALUES,
    REFUSED,
    SAME,
    SWITCHES,
    TRANSLATED,
)
from saccade.cli.commands import COMMANDS, new_parser
from saccade.cli.parser import settings_from
from saccade.config import Mode
from saccade.errors import ConfigError
from saccade.server.server_settings import ServerSettings
from saccade.wire.engine_settings import EngineSettings, SchedulerSettings

# The commands of sglang#15320, but for the first words and the model.
SERVE = (
    "--host 127.0.0.1 --mem-fraction-static 0.7 --port 30000 --max-running-requests 64 --chunked-prefill-size 8192 "
    "--attention-backend fa3 --mm-attention-backend fa3 --enable-multimodal --model FOLDER --disable-radix-cache "
    "--piecewise-cuda-graph-max-tokens 4096 --enable-piecewise-cuda-graph --piecewise-cuda-graph-compiler eager "
    "{tp}--disable-custom-all-reduce --enable-torch-symm-mem"
)
BENCH = (
    "--backend sglang-oai-chat --dataset-name image --num-prompts 256 --apply-chat-template --random-input-len 128 "
    "--random-output-len 1 --image-resolution 560x560 --image-format jpeg --image-count 1 --image-content random "
    "--random-range-ratio 0.1 --port 30000 --max-concurrency 32 --warmup-requests 5"
)


def read(*words: str, command: str = "serve") -> Any:
    return new_parser(command).read(words)


def write(folder: Path, text: str) -> str:
    path = folder / "settings.yaml"
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize("name", ["hermes", "llama3_json"])
def test_forms_of_tool_calls_that_are_understood_may_be_named(name: str) -> None:
    assert not read("--tool-call-parser", name).notes
    with pytest.raises(ConfigError, match=r"the chat template decides .* Llama 3's JSON"):
        read("--tool-call-parser", "pythonic")


def test_the_server_of_sglang_15320_is_understood() -> None:
    flags = read(*shlex.split(SERVE.format(tp="")))
    server, engine = settings_from(flags, ServerSettings), settings_from(flags, EngineSettings)
    limits = settings_from(flags, SchedulerSettings)
    assert (server.host, server.port, flags.words) == ("127.0.0.1", 30000, ["FOLDER"])
    assert (engine.gpu_memory_utilization, engine.enable_prefix_caching) == (0.7, False)
    assert engine.phase_modes() == {"vision": Mode.FULL, "prefill": Mode.PIECEWISE, "decode": Mode.FULL}
    assert (limits.max_num_seqs, limits.max_num_batched_tokens, limits.prefill_chunk_tokens) == (64, 8192, 0)
    noted = [note.split(" changes nothing: ")[0] for note in flags.notes]
    assert noted == [
        "--attention-backend",
        "--mm-attention-backend",
        "--enable-multimodal",
        "--piecewise-cuda-graph-max-tokens",
        "--piecewise-cuda-graph-compiler",
        "--disable-custom-all-reduce",
        "--enable-torch-symm-mem",
    ]


def test_the_ranks_of_the_server_of_sglang_15320_are_understood() -> None:
    flags = read(*shlex.split(SERVE.format(tp="--tp-size 4 ")))
    assert settings_from(flags, EngineSettings).tensor_parallel_size == 4
    assert not any("--tp-size" in note for note in flags.notes)


def test_the_benchmark_of_sglang_15320_is_understood() -> None:
    flags = read(*shlex.split(BENCH), command="bench serve")
    assert (flags.backend, flags.dataset_name, flags.num_prompts) == ("sglang-oai-chat", "image", 256)
    assert (flags.image_resolution, flags.port, flags.max_concurrency, flags.warmup_requests) == (
        "560x560",
        30000,
        32,
        5,
    )
    [note] = flags.notes
    assert note.startswith("--apply-chat-template changes nothing: with a chat backend")


@pytest.mark.parametrize(
    ("words", "field", "value"),
    [
        (["--mem-fraction-static", "0.5"], "gpu_memory_utilization", 0.5),
        (["--context-length", "4k"], "max_model_len", 4000),
        (["--max-running-requests", "7"], "max_num_seqs", 7),
        (["--disable-cuda-graph"], "enforce_eager", True),
        (["--disable-radix-cache"], "enable_prefix_caching", False),
        (["--page-size", "64"], "block_size", 64),
        (["--max-queued-requests", "9"], "max_queued_requests", 9),
        (["--chunked-prefill-size", "2K"], "max_num_batched_tokens", 2048),
        (["--max-prefill-tokens", "16K", "--chunked-prefill-size", "2K"], "max_num_batched_tokens", 2048),
        (["--chunked-prefill-size", "2K", "--max-prefill-tokens", "16K"], "max_num_batched_tokens", 2048),
        (["--long-prefill-token-threshold", "512"], "prefill_chunk_tokens", 512),
        (["--log-requests"], "access_log", True),
        (["--disable-log-requests"], "access_log", False),
        (["--no-enable-log-requests"], "access_log", False),
        (["--sampling-defaults", "openai"], "generation_config", "none"),
        (["--generation-config", "vllm"], "generation_config", "vllm"),
        (["--fastapi-root-path", "/a"], "root_path", "/a"),
        (["--revision", "v2"], "revision", "v2"),
        (["--download-dir", "/tmp/x"], "download_dir", "/tmp/x"),
        (["--chat-template", "a.jinja"], "chat_template", "a.jinja"),
    ],
)
def test_names_of_other_engines_mean_ours(words: list[str], field: str, value: Any) -> None:
    flags = read(*words)
    assert getattr(flags, field) == value and not flags.notes


def test_a_chunk_of_minus_one_sets_nothing_and_says_what_happens() -> None:
    flags = read("--chunked-prefill-size", "-1")
    assert flags.max_num_batched_tokens == 0
    [note] = flags.notes
    assert note.startswith(
        "--chunked-prefill-size -1: prompts longer than --max-num-batched-tokens still take several steps"
    )


@pytest.mark.parametrize(
    ("graphs", "prefill", "vision"),
    [
        ([], Mode.PIECEWISE, Mode.FULL),
        (["--graphs", "vision=off"], Mode.PIECEWISE, None),
        (["--graphs", "prefill=full"], Mode.FULL, Mode.FULL),
        (["--graphs", "prefill=off,vision=off"], None, None),
    ],
)
def test_piecewise_graphs_are_those_of_prefill_unless_graphs_says_otherwise(
    graphs: list[str], prefill: Mode | None, vision: Mode | None
) -> None:
    for words in (["--enable-piecewise-cuda-graph", *graphs], [*graphs, "--enable-piecewise-cuda-graph"]):
        modes = settings_from(read(*words), EngineSettings).phase_modes()
        assert (modes["prefill"], modes["vision"], modes["decode"]) == (prefill, vision, Mode.FULL)


def test_aliases_point_at_settings_that_exist() -> None:
    known = {name for command in COMMANDS for name in new_parser(command).kinds}
    pairs = [*SWITCHES.values(), *TRANSLATED.values()]
    assert {*SAME.values(), *BUDGETS.values(), *(field for field, _ in pairs)} <= known


@pytest.mark.parametrize(
    ("command", "switches", "values"),
    [("serve", IGNORED_SWITCHES, IGNORED_VALUES), ("bench serve", BENCH_IGNORED_SWITCHES, BENCH_IGNORED_VALUES)],
)
def test_a_harmless_flag_is_taken_and_says_once_what_happens_instead(
    command: str, switches: dict[str, str], values: dict[str, str]
) -> None:
    plain = vars(read(command=command)) | {"notes": ()}
    for flag, note in (switches | values).items():
        words = [flag] if flag in switches else [flag, "something"]
        flags = read(*words, *words, command=command)
        assert flags.notes == (f"{flag} changes nothing: {note}",)
        assert vars(flags) | {"notes": ()} == plain


def test_a_switch_leaves_the_word_behind_it_alone() -> None:
    assert read("--enable-multimodal", "a/b", "--enable-auto-tool-choice").words == ["a/b"]


@pytest.mark.parametrize(("command", "refused"), [("serve", REFUSED), ("bench serve", BENCH_REFUSED)])
def test_a_flag_that_cannot_be_honoured_says_why(command: str, refused: dict[str, tuple[str, frozenset[str]]]) -> None:
    for flag, (reason, neutral) in refused.items():
        with pytest.raises(ConfigError) as caught:
            read(flag, "something", command=command)
        assert f"{flag} is refused: {reason}" in str(caught.value)
        for value in neutral:
            assert not read(flag, value, command=command).notes


def test_code_from_checkpoints_is_refused_with_a_way_on() -> None:
    with pytest.raises(
        ConfigError, match=r"code from a checkpoint is never run.*Leave the flag out.*`saccade doctor MODEL`"
    ):
        read("--trust-remote-code", "--port", "1")


@pytest.mark.parametrize("flag", ["-tp", "--tensor-parallel-size", "--tp-size", "--tp"])
def test_ranks_have_the_names_of_other_engines(flag: str) -> None:
    assert settings_from(read(flag, "4"), EngineSettings).tensor_parallel_size == 4
    with pytest.raises(ConfigError, match="tensor_parallel_size is 0; it must be at least 1"):
        settings_from(read(flag, "0"), EngineSettings)
    with pytest.raises(ConfigError, match=f"{flag}|tensor-parallel-size"):
        read(flag, "two")


@pytest.mark.parametrize("command", COMMANDS)
def test_a_suggestion_names_no_flag_that_sets_nothing(command: str) -> None:
    """Not even for a flag that differs from it in a letter."""
    unmapped = {
        *IGNORED_SWITCHES,
        *IGNORED_VALUES,
        *REFUSED,
        *BENCH_IGNORED_SWITCHES,
        *BENCH_IGNORED_VALUES,
        *BENCH_REFUSED,
    }
    parser = new_parser(command)
    own = {f"--{name.replace('_', '-')}" for name in parser.kinds}
    for flag in sorted(unmapped - own):
        with pytest.raises(ConfigError) as caught:
            parser.read([f"{flag}x"])
        _, _, suggested = str(caught.value).partition("did you mean ")
        assert not {word.strip("?") for word in suggested.split()} & (unmapped - own), caught.value


def test_a_file_may_have_all_of_it_too(tmp_path: Path) -> None:
    text = (
        "model-path: a/b\ncontext-length: 2k\nenable-metrics: true\nenable-multimodal: false\nattention_backend: fa3\n"
    )
    text += "chunked-prefill-size: 4096\nenable-piecewise-cuda-graph: true\ntrust-remote-code: false\ntp-size: 1\n"
    flags = read("--config", write(tmp_path, text))
    assert (flags.words, flags.max_model_len, flags.max_num_batched_tokens) == (["a/b"], 2000, 4096)
    assert flags.graphs == "prefill=piecewise"
    assert [note.split()[0] for note in flags.notes] == ["--enable-metrics", "--attention-backend"]
    assert read("--config", write(tmp_path, text), "c", "--chunked-prefill-size", "99").max_num_batched_tokens == 99
    with pytest.raises(ConfigError, match=r"settings\.yaml: --trust-remote-code is refused"):
        read("--config", write(tmp_path, "trust-remote-code: true"))
    assert read("--config", write(tmp_path, "tp-size: 4")).tensor_parallel_size == 4
    with pytest.raises(ConfigError, match="unknown setting help"):
        read("--config", write(tmp_path, "help: true"))


@pytest.mark.parametrize("words", [["--model-path", "a/b"], ["--model", "a/b"], ["a/b"]])
def test_a_model_may_be_named_in_three_ways(words: list[str]) -> None:
    assert read(*words).words == ["a/b"]


def test_two_models_are_an_error() -> None:
    assert read("a/b", "--model", "a/b").words == ["a/b"]
    with pytest.raises(ConfigError, match="two models were given, 'a/b' and --model 'c/d'; give one"):
        read("a/b", "--model", "c/d")


def test_notes_are_plain_lines_beside_the_output(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    status = main(["plan", str(tmp_path / "nothing"), "--enable-multimodal", "--enable-multimodal"])
    shown = capsys.readouterr()
    assert status == 2 and not shown.out
    first, second = shown.err.splitlines()
    assert first == f"warning: --enable-multimodal changes nothing: {IGNORED_SWITCHES['--enable-multimodal']}"
    assert second.startswith("saccade: ")
