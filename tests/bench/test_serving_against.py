"""`saccade bench serve --against`: the same content for all servers, in turns, with ratios that say who is ahead."""

import io
import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from saccade.bench.load.client import Client, arrivals, drive
from saccade.bench.load.load_settings import LoadSettings, TargetSettings, WorkloadSettings
from saccade.bench.serving import serving_run as serving_module
from saccade.bench.serving.serving_command import bench_serve
from saccade.bench.serving.serving_comparison import Comparison, ratio_table
from saccade.bench.serving.serving_run import Shown
from saccade.bench.serving.serving_settings import AgainstSettings, OutputSettings, ServingPlan, VariantSettings
from saccade.bench.serving.serving_turns import round_seed, run_against, turn_order
from saccade.cli import main
from saccade.errors import ConfigError
from tests.bench.scripted import Asked, Reply, as_json, nobody, serving
from tests.bench.scripted_cache import CachingServer
from tests.bench.test_report import checked

NUM_PROMPTS = 6
WORKLOAD = WorkloadSettings(
    num_prompts=NUM_PROMPTS, image_resolution="32x20", random_input_len=30, random_output_len=3, seed=5
)
LOAD = LoadSettings(max_concurrency=2, warmup_requests=1)
SILENT = Shown(Console(quiet=True))


@contextmanager
def running(*servers: CachingServer) -> Iterator[list[str]]:
    with ExitStack() as stack:
        yield [stack.enter_context(serving(server)).url for server in servers]


def compared(urls: list[str], rounds: int = 2, workload: WorkloadSettings = WORKLOAD) -> Comparison:
    plan = ServingPlan(TargetSettings(base_url=urls[0]), workload, LOAD)
    kept: list[Comparison] = []
    run_against(plan, AgainstSettings(against=tuple(urls[1:]), rounds=rounds, settle_s=0), SILENT, kept.append)
    return kept[0]


def test_servers_take_turns_in_an_order_that_changes_with_the_round() -> None:
    turns: list[str] = []
    with running(CachingServer("a", turns), CachingServer("b", turns)) as urls:
        comparison = compared(urls, rounds=4)
    sizes = [(name, len(list(group))) for name, group in groupby(turns)]
    n = NUM_PROMPTS
    assert sizes == [("a", n), ("b", n), ("a", n), ("b", 2 * n), ("a", n), ("b", n), ("a", 2 * n), ("b", n)]
    assert comparison.orders == [["a", "b"], ["b", "a"], ["b", "a"], ["a", "b"]]


def test_every_server_has_every_place_equally_often() -> None:
    for count in (2, 3, 4):
        orders = [turn_order(number, count) for number in range(2 * count)]
        assert all(sorted(order) == list(range(count)) for order in orders)
        for place in range(count):
            assert sorted(order[place] for order in orders) == sorted([*range(count)] * 2)


def test_all_servers_get_the_same_content_and_no_content_comes_twice() -> None:
    servers = [CachingServer("a"), CachingServer("b"), CachingServer("c")]
    with running(*servers) as urls:
        comparison = compared(urls, rounds=3)
    first, *others = (server.contents for server in servers)
    for start in range(0, len(first), NUM_PROMPTS):  # round by round; two requests are under way at the same time
        part = slice(start, start + NUM_PROMPTS)
        assert all(sorted(other[part]) == sorted(first[part]) for other in others)
    assert len(first) == len(set(first)) == 4 * NUM_PROMPTS  # the warm-up and three rounds
    assert all(run.warnings == [] for run in comparison.runs) and comparison.warnings == []
    assert {run.environment["model"] for run in comparison.runs} == {"a-model", "b-model", "c-model"}
    assert [run.figures["completed"] for run in comparison.runs] == [3 * NUM_PROMPTS] * 3
    assert comparison.ratios.keys() == {"b", "c"}
    heads = [column.header for column in ratio_table(comparison).columns]
    assert heads == ["", "a", "b", "c", "a : b", "95% interval", "ahead", "a : c", "95% interval", "ahead"]


def test_all_servers_get_the_same_requests_in_the_same_order_at_the_same_times(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: dict[str, list[object]] = {}

    async def noted(client: Client, requests: Sequence[bytes], load: LoadSettings, **how: Any) -> Any:
        bodies = [json.loads(request.partition(b"\r\n\r\n")[2])["messages"] for request in requests]
        due = arrivals(len(requests), LoadSettings(request_rate=3.0), how.get("seed", 0))
        sent.setdefault(client.target.url, []).append((bodies, due))
        return await drive(client, requests, load, **how)

    monkeypatch.setattr(serving_module, "drive", noted)
    with running(CachingServer("a"), CachingServer("b")) as urls:
        compared(urls, rounds=2)
    first, other = (sent[url] for url in urls)
    assert first == other and len(first) == 3 and first[1] != first[2]


def test_the_seed_repeats_the_content_but_not_that_of_the_warm_up() -> None:
    servers = [CachingServer("a"), CachingServer("b")]
    with running(*servers) as urls:
        runs = [compared(urls), compared(urls)]
    contents = servers[0].contents
    early, late = contents[: 3 * NUM_PROMPTS], contents[3 * NUM_PROMPTS :]
    assert sorted(early[NUM_PROMPTS:]) == sorted(late[NUM_PROMPTS:])
    assert not set(early[:NUM_PROMPTS]) & set(late[:NUM_PROMPTS])
    assert runs[0].warnings == [] and runs[0].runs[0].environment["content"] == runs[1].runs[1].environment["content"]
    assert [line.split(" already")[0] for line in runs[1].warnings] == ["WARM CACHE: a", "WARM CACHE: b"]
    assert len({round_seed(seed, number) for seed in range(9) for number in range(9)}) == 81


def with_times(monkeypatch: pytest.MonkeyPatch, token_s: dict[str, float]) -> None:
    """By the address of a server, the seconds that it takes for a token, instead of those that this machine took."""

    async def told(client: Client, requests: Sequence[bytes], load: LoadSettings, **how: Any) -> Any:
        outcomes, _ = await drive(client, requests, load, **how)
        one = token_s[client.target.url]
        times = tuple(one * number for number in (1, 2, 3))
        outcomes = [replace(each, ttft_s=times[0], e2el_s=times[-1], token_times_s=times) for each in outcomes]
        return outcomes, times[-1] * len(outcomes)

    monkeypatch.setattr(serving_module, "drive", told)


def test_a_slow_server_is_behind_and_the_report_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = OutputSettings(result_dir=str(tmp_path), result_filename="x.json", report=str(tmp_path / "x.html"))
    text = io.StringIO()
    with running(CachingServer("quick"), CachingServer("slow")) as urls:
        with_times(monkeypatch, dict(zip(urls, (0.1, 0.15), strict=True)))
        plan = ServingPlan(TargetSettings(base_url=urls[0], api_key="secret"), WORKLOAD, LOAD, output)
        against = AgainstSettings(against=(urls[1],), rounds=3, settle_s=0)
        code = bench_serve({"": plan}, Console(file=text, width=200), against=against)
    shown = text.getvalue()
    assert code == 0 and shown.count("Serving Benchmark Result") == 2
    assert (
        "a ratio above 1: quick is ahead" in shown
        and "95% interval" in shown
        and "quick is ahead of slow in: requests/s" in shown
    )
    saved = json.loads((tmp_path / "x.json").read_text())
    assert (saved["first"], saved["rounds"], saved["seed"]) == ("quick", 3, 5) and len(saved["targets"]) == 2
    found = {ratio["key"]: ratio for ratio in saved["ratios"]["slow"]}
    for key in ("request_throughput", "mean_ttft_ms", "median_e2el_ms"):
        assert found[key]["low"] > 1 and not found[key]["includes_one"]
    page = (tmp_path / "x.html").read_text()
    words = " ".join(checked(page).words)
    for part in ("a ratio above 1: quick is ahead", "95% interval", "quick is ahead of slow in", "Environment of slow"):
        assert part in words
    assert "secret" not in page + json.dumps(saved)


def test_other_work_and_failures_are_said_in_red() -> None:
    servers = [CachingServer("a"), CachingServer("b", image_tokens=40)]
    text = io.StringIO()
    with running(*servers) as urls:
        plan = ServingPlan(TargetSettings(base_url=urls[0]), WORKLOAD, LOAD)
        console = Console(file=text, width=200, force_terminal=True, color_system="standard")
        bench_serve({"": plan}, console, against=AgainstSettings(against=(urls[1],), rounds=2, settle_s=0))
    assert "\x1b[1;31mNOT THE SAME WORK: input tokens a request: a " in text.getvalue()


def test_the_command_with_two_addresses_is_enough(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--num-prompts", "3", "--image-resolution", "32x20", "--random-input-len", "20", "--rounds", "2"]
    with running(CachingServer("vllm"), CachingServer("saccade")) as urls:
        line = ["bench", "serve", "--base-url", urls[1], "--against", urls[0], "--settle-s", "0", *flags]
        assert main(line) == 0
    out = capsys.readouterr().out
    assert "ahead of" in out or "no difference shown between saccade and vllm (the interval includes 1) in" in out


def test_names_are_the_users_then_the_engines_then_addresses() -> None:
    with running(CachingServer("vllm"), CachingServer("vllm"), CachingServer("sglang")) as urls:
        named = [urls[0], f"mine=vllm-chat@{urls[1]}", urls[2]]
        comparison = compared(named)
    port = urls[0].rpartition(":")[2]
    assert [run.name for run in comparison.runs] == [f":{port}", "mine", "sglang"]
    assert [run.settings["target"]["backend"] for run in comparison.runs] == ["openai-chat", "vllm-chat", "openai-chat"]


def test_a_server_that_is_not_there_is_named_before_anything_is_sent() -> None:
    here = CachingServer("a")
    with nobody() as missing, running(here) as [url]:
        with pytest.raises(ConfigError, match=rf"{missing} cannot be reached: .*is it up\? \(--against\)"):
            compared([url, missing])
        with pytest.raises(ConfigError, match=rf"{missing} cannot be reached: .*\(--base-url, --host, --port\)"):
            compared([missing, url])
    assert here.contents == []


@pytest.mark.parametrize(
    ("status", "message"), [(401, r"asks for a key \(HTTP 401\); .*--against-api-key"), (404, "which model it serves")]
)
def test_a_server_that_does_not_let_in_or_name_a_model_is_named(status: int, message: str) -> None:
    async def refuse(asked: Asked) -> Reply:
        yield as_json({"error": {"message": "no"}}, status)

    with running(CachingServer("a")) as [url], serving(refuse) as other, pytest.raises(ConfigError, match=message):
        compared([url, other.url])


def test_a_server_that_answers_nothing_ends_the_comparison() -> None:
    dead = CachingServer("b")
    dead.is_dead = True
    with running(CachingServer("a"), dead) as urls:
        with pytest.raises(ConfigError, match=rf"all 6 warm-up requests to {urls[1]} failed: .*engine_dead: gone"):
            compared(urls)
        plan = ServingPlan(TargetSettings(base_url=urls[0]), WORKLOAD, LoadSettings(warmup_requests=0))
        against = AgainstSettings(against=(urls[1],), rounds=2, settle_s=0)
        with pytest.raises(ConfigError, match=rf"{urls[1]} answered none of 6 requests.*engine_dead: gone"):
            run_against(plan, against, SILENT, lambda comparison: None)


def test_a_comparison_that_ends_early_is_over_the_rounds_that_all_have_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[str] = []

    async def interrupted(client: Client, requests: Sequence[bytes], load: LoadSettings, **how: Any) -> Any:
        calls.append(client.target.url)
        if len(calls) == 6:
            raise KeyboardInterrupt
        return await drive(client, requests, load, **how)

    monkeypatch.setattr(serving_module, "drive", interrupted)
    flags = "--num-prompts 4 --image-resolution 32x20 --random-input-len 20 --warmup-requests 0 --settle-s 0"
    files = ["--report", str(tmp_path / "x.html"), "--json", str(tmp_path / "x.json")]
    with running(CachingServer("a"), CachingServer("b")) as urls:
        line = ["bench", "serve", "--base-url", urls[0], "--against", urls[1], *flags.split(), *files]
        assert main(line) == 130
    shown = capsys.readouterr()
    assert "2 rounds in turn" in shown.out and "INCOMPLETE: 2 of 6 rounds" in shown.out
    assert all(f"round {number} of 6: {name}: " in shown.err for number in (1, 2) for name in "ab")
    assert "round 3 of 6: b: " in shown.err and "round 3 of 6: a: " not in shown.err  # b was first
    saved = json.loads((tmp_path / "x.json").read_text())
    assert (saved["is_complete"], saved["rounds"], len(saved["orders"])) == (False, 2, 2) and saved["ratios"]["b"]
    assert [target["completed"] for target in saved["targets"]] == [8, 8]
    assert "INCOMPLETE: 2 of 6 rounds" in " ".join(checked((tmp_path / "x.html").read_text()).words)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"against": ("127.0.0.1:8001",)}, r"against is '127\.0\.0\.1:8001'; write \[NAME=\]"),
        ({"against": ("http://",)}, "--against"),
        ({"against": ("http://host:port",)}, "--against"),
        ({"against": ("trt@http://host:1",)}, "backend 'trt'; allowed are openai-chat"),
        ({"rounds": 1}, r"rounds is 1; it must be at least 2 \(--rounds\)"),
        ({"settle_s": -1.0}, "--settle-s"),
    ],
)
def test_wrong_settings_name_their_flag(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        AgainstSettings(**fields)  # type: ignore[arg-type]


def test_what_does_not_go_together_is_refused() -> None:
    against = AgainstSettings(against=("http://127.0.0.1:8001",))
    console = Console(quiet=True)
    with pytest.raises(ConfigError, match="leave out --serve-model"):
        bench_serve({"": ServingPlan()}, console, VariantSettings(serve_model="m"), against)
    with pytest.raises(ConfigError, match="leave out --compare"):
        bench_serve({"": ServingPlan(output=OutputSettings(compare="x.json"))}, console, against=against)
    with pytest.raises(ConfigError, match=r"http://127\.0\.0\.1:8001 is named twice"):
        bench_serve({"": ServingPlan(TargetSettings(port=8001))}, console, against=against)


def test_a_file_goes_on_from_round_to_round(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": f"{'word ' * 30}{index}"}) for index in range(20)))
    servers = [CachingServer("a"), CachingServer("b")]
    workload = WorkloadSettings(dataset_name="custom", dataset_path=str(path), num_prompts=5)
    with running(*servers) as urls:
        comparison = compared(urls, workload=workload)
        again = compared(urls, workload=workload)
    assert sorted(servers[0].contents[5:15]) == sorted(f"{'word ' * 30}{index}" for index in range(10))
    assert len(set(servers[1].contents[:15])) == 15 and comparison.warnings == []
    assert "The file repeats itself" in again.runs[0].warnings[0]
