"""Requests that are refused before they are queued, and the pixels that live requests keep."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from saccade.errors import CapacityError, RequestError
from saccade.inputs.placeholders import Media, Prompt, text_prompt
from saccade.inputs.plans import MediaPlan
from saccade.inputs.positions import FeatureRows, mrope_positions, rope_delta
from saccade.inputs.text.chat_messages import MediaKind
from saccade.scheduling.request_checks import PixelAccount, check_frames, check_tokens, output_shift, spans_of
from saccade.wire.engine_settings import SchedulerSettings
from saccade.wire.sampling_params import SamplingParams

LIMITS = SchedulerSettings(max_media_bytes=1000)
VOCAB = 120


def prompt_of(*num_bytes: int, frames: int = 1, rows: int = 4) -> Prompt:
    plan = MediaPlan((4, 4), (frames, 2, 2), 4 * frames * rows, frames * rows)
    media = tuple(Media("image", np.zeros((size, 1, 1), np.uint8), plan, bytes(32)) for size in num_bytes)
    text = text_prompt([1])
    return Prompt(text.token_ids, text.positions_3T, 0, media=media)


def check(ids: list[int], **params: Any) -> None:
    check_tokens(text_prompt(ids), SamplingParams(**params), VOCAB, frozenset({2}))


@pytest.mark.parametrize("ids", [[VOCAB], [5, -1], [0, VOCAB - 1, 10**6]])
def test_tokens_outside_the_vocabulary_are_refused(ids: list[int]) -> None:
    with pytest.raises(RequestError, match=r"outside 0\.\.119") as refused:
        check(ids)
    assert refused.value.param == "prompt"
    check([0, VOCAB - 1])
    check([])


@pytest.mark.parametrize("name", ["logit_bias", "allowed_token_ids", "pooled_token_ids"])
def test_parameters_may_name_only_tokens_of_the_vocabulary(name: str) -> None:
    more = {"pooling": "logits", "max_tokens": 0} if name == "pooled_token_ids" else {}
    values = [[5, VOCAB - 1], [5, VOCAB]]
    good, bad = (dict.fromkeys(found, 1.0) if name == "logit_bias" else found for found in values)
    check([1], **{name: good}, **more)
    with pytest.raises(RequestError, match="names token 120; the vocabulary has 120") as refused:
        check([1], **{name: bad}, **more)
    assert refused.value.param == name


def test_min_tokens_needs_an_allowed_token_that_is_not_an_end() -> None:
    for ends in ([2], [2, 7]):
        with pytest.raises(RequestError, match="all end tokens"):
            check([1], min_tokens=3, allowed_token_ids=ends, stop_token_ids=[7])
        check([1], allowed_token_ids=ends, stop_token_ids=[7])
    check([1], min_tokens=3, allowed_token_ids=[2, 8], stop_token_ids=[7])
    check([1], min_tokens=3, stop_token_ids=[7])


def test_pixels_count_once_per_prompt_until_its_last_output_ends() -> None:
    account, prompt, other = PixelAccount(), prompt_of(300, 200), prompt_of(100)
    account.count(prompt, 3)
    account.count(other, 1)
    assert account.nbytes == 600
    account.count(prompt, -2)
    assert account.nbytes == 600
    account.count(prompt, -1)
    assert account.nbytes == 100
    account.count(other, -1)
    assert account.nbytes == 0 and not account._uses


def test_pixels_beyond_the_limit_are_refused_unless_they_are_the_only_ones() -> None:
    account, one, more = PixelAccount(), prompt_of(600), prompt_of(600)
    account.check(prompt_of(5000), LIMITS)
    account.count(one, 1)
    account.check(prompt_of(300, 100), LIMITS)
    with pytest.raises(CapacityError, match="hold 600 bytes of pixels and 401 would join them; the limit is 1000"):
        account.check(prompt_of(300, 101), LIMITS)
    account.count(more, 1)
    account.check(text_prompt([1]), LIMITS)


def test_strict_graphs_refuse_a_frame_too_large_for_any_graph() -> None:
    def vision(strict: bool) -> Any:
        return SimpleNamespace(settings=SimpleNamespace(strict=strict), shape=SimpleNamespace(limits={"units": 16}))

    for fitting in (text_prompt([1]), prompt_of(1, rows=16), prompt_of(1, 1, frames=8, rows=16)):
        check_frames(fitting, vision(strict=True))
    with pytest.raises(RequestError, match="has 17 rows; the limit is 16"):
        check_frames(prompt_of(1, frames=8, rows=17), vision(strict=True))
    check_frames(prompt_of(1, frames=8, rows=17), vision(strict=False))


def placed(kind: MediaKind, offset: int, interval: float = 1.0) -> Prompt:
    """A prompt with one image or video of 2 x 4 x 4 rows."""
    block = FeatureRows(offset, (2, 4, 4), interval)
    positions = mrope_positions(60, [block])
    one = Media(kind, np.zeros((0, 0, 3), np.uint8), MediaPlan((8, 8), (2, 8, 8), 128, 32), bytes(32))
    return Prompt(np.zeros(60, np.int32), positions, rope_delta(positions), media=(one,), spans=(block,))


def layout(prompt: Prompt) -> bytes:
    [span] = spans_of(prompt, is_whole=False)
    return span.layout


def test_the_key_of_a_video_depends_on_its_time_steps_but_not_on_its_place() -> None:
    assert layout(placed("video", 3)) == layout(placed("video", 9)) != layout(placed("video", 3, interval=2.0))


def test_keys_do_not_grow_with_the_rows_of_an_image_or_video() -> None:
    """Every block of the span digests its layout again."""
    assert layout(placed("image", 3)) == b"" and len(layout(placed("video", 3))) == 32


@pytest.mark.parametrize(("kind", "interval"), [("image", 1.0), ("video", 1.0), ("video", 5.0)])
def test_outputs_are_shifted_by_the_time_steps_that_text_after_a_video_ignores(
    kind: MediaKind, interval: float
) -> None:
    prompt = placed(kind, 28, interval)  # at the end, where its time may be ahead of its rows
    ahead = int(prompt.positions_3T.max()) - int(prompt.positions_3T[1:].max())
    assert output_shift(prompt) == ahead == (2 if interval == 5.0 else 0)
