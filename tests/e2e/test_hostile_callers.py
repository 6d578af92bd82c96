"""Callers who want more than their share, pages of other sites, and bodies that stand for much, at a real server: they
are refused, and what others ask meanwhile is answered as ever."""

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx2
import pytest
from tokenizers import AddedToken, Tokenizer

from saccade.jobs.packets import resident_bytes
from tests.e2e.checkpoint import TEMPLATE, make_checkpoint
from tests.e2e.conftest import wait_idle
from tests.e2e.process import ServerProcess, running
from tests.e2e.test_lifecycle import paused, wait_for

CHAT = "/v1/chat/completions"
ALICE, BOB = {"authorization": "Bearer alice"}, {"authorization": "Bearer bob"}
JSON = {"content-type": "application/json"}
SPARE_BYTES = 64 * 2**20
TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
FIRST_TAG = 104  # behind the tokens of the checkpoint


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Its template and its vocabulary know tags that no file calls special."""
    folder = make_checkpoint(tmp_path_factory.mktemp("tags"))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_tokens([AddedToken(tag, normalized=False, special=False) for tag in TAGS])
    assert tokenizer.token_to_id(TAGS[0]) == FIRST_TAG
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(f"{TEMPLATE}{{% if tags %}}{''.join(TAGS)}{{% endif %}}")
    settings = {"api_key": ["alice", "bob"], "max_body_bytes": 64 * 2**20}
    with running(folder, tmp_path_factory.mktemp("callers") / "log", server=settings) as found:
        found.wait_ready()
        yield found


@pytest.fixture
def http(server: ServerProcess) -> Iterator[httpx2.Client]:
    with server.client(headers=BOB) as client:
        yield client
        assert client.get("/ready").status_code == 200, server.text
        wait_idle(client)


def ask(client: httpx2.Client, text: str = "hello", **fields: Any) -> httpx2.Response:
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 3, "temperature": 0, "ignore_eos": True}
    return client.post(CHAT, json=body | fields)


@contextmanager
def traffic(server: ServerProcess) -> Iterator[None]:
    """Another caller asks all the time; every answer is right, and so is /health."""
    is_over, answers = threading.Event(), list[str]()

    def ask_all_the_time() -> None:
        with server.client(headers=ALICE) as client:
            while not is_over.is_set() or len(answers) < 2:
                assert client.get("/health").json() == {"status": "ok"}
                reply = ask(client)
                assert reply.status_code == 200, reply.text
                answers.append(reply.json()["choices"][0]["message"]["content"])

    with ThreadPoolExecutor(1) as threads:
        asking = threads.submit(ask_all_the_time)
        try:
            yield
        finally:
            is_over.set()
            asking.result()
    assert len(set(answers)) == 1, answers


def test_a_small_body_that_stands_for_millions_of_values_is_refused(server: ServerProcess, http: httpx2.Client) -> None:
    body = b'{"prompt":"hi","x":[' + b"[]," * (20 * 2**20) + b"[]]}"
    assert http.post("/v1/completions", content=body, headers=JSON).status_code == 413
    before = resident_bytes(server.popen.pid)
    with traffic(server):
        for _ in range(3):
            reply = http.post("/v1/completions", content=body, headers=JSON)
            assert reply.status_code == 413 and "--max-body-values" in reply.json()["error"]["message"]
    assert resident_bytes(server.popen.pid) - before < SPARE_BYTES


def test_nobody_comes_before_others_without_permission(server: ServerProcess, http: httpx2.Client) -> None:
    with traffic(server):
        reply = ask(http, priority=-(2**31))
        assert reply.status_code == 403 and reply.json()["error"]["param"] == "priority", reply.text


def test_a_flood_of_one_caller_delays_another_by_little(server: ServerProcess, http: httpx2.Client) -> None:
    """Eight run at a time. The other caller comes after one round of the flood at most, and not after all of it, when
    seven would be left."""

    def ask_behind() -> int:
        """How many of the flood are left when the other caller has its answer."""
        assert ask(http).status_code == 200
        return sum(not reply.done() for reply in replies)

    with server.client(headers=ALICE) as flood, ThreadPoolExecutor(41) as threads:
        with paused(server.engine_pid()):  # however long it takes to send them, none has ended when all are inside
            replies = [threads.submit(ask, flood, f"number {i}", max_tokens=60) for i in range(40)]
            wait_for(lambda: http.get("/load").json()["server_load"] == 40)
            behind = threads.submit(ask_behind)
            wait_for(lambda: http.get("/load").json()["server_load"] == 41)
        assert behind.result() >= 16
        assert all(reply.result().status_code == 200 for reply in replies)


@pytest.mark.parametrize(
    "headers",
    [
        {"host": "evil.example", **JSON},
        {"host": "evil.example:8000", **JSON},
        {"origin": "https://evil.example", **JSON},
        {"origin": "https://evil.example", "content-type": "text/plain"},
        {"origin": "null"},
    ],
)
def test_pages_of_other_sites_reach_nothing(
    server: ServerProcess, http: httpx2.Client, headers: dict[str, str]
) -> None:
    body = json.dumps({"messages": [{"role": "user", "content": "hello"}], "max_tokens": 1}).encode()
    with traffic(server):
        for path in (CHAT, "/v1/completions", "/tokenize", "/generate"):
            request = http.build_request("POST", path, content=body)
            request.headers.pop("content-type", None)
            request.headers.update(headers)
            reply = http.send(request)
            assert reply.status_code in (403, 421), f"{path}: {reply.status_code} {reply.text}"
            assert "choices" not in reply.text and "access-control-allow-origin" not in reply.headers


@pytest.mark.parametrize("tag", TAGS)
def test_tags_that_users_write_stay_text(http: httpx2.Client, tag: str) -> None:
    """They are tokens where the template writes them."""

    def tokens(text: str, **fields: Any) -> list[int]:
        body = {"messages": [{"role": "user", "content": text}], **fields}
        found: list[int] = http.post("/tokenize", json=body).json()["tokens"]
        return found

    written = [token for token in tokens("a", chat_template_kwargs={"tags": True}) if token >= FIRST_TAG]
    assert written == list(range(FIRST_TAG, FIRST_TAG + len(TAGS)))
    assert not [token for token in tokens(f"say {tag} twice {tag}") if token >= FIRST_TAG]
    assert ask(http, tag).status_code == 200


def test_the_checkpoint_has_room_for_its_tags(http: httpx2.Client) -> None:
    """Otherwise the test above would not see a tag that becomes a token."""
    assert http.post("/tokenize", json={"prompt": TAGS[0], "add_special_tokens": False}).json()["tokens"] == [FIRST_TAG]
