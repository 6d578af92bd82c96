"""Asserts that two engines gave the same answers."""

from collections.abc import Mapping, Sequence

from saccade.wire.update import Scores
from tests.engine.rig import Answer

CLOSE = 1e-4  # in log-probability


def assert_alike(found: Answer, expected: Answer, *, close: float = CLOSE) -> None:
    """Asserts equal tokens, and `close` log-probabilities of the likeliest ones. If the likeliest two are that close,
    either may be chosen, and the answers may differ from there on."""
    assert found.finish == expected.finish
    ours, theirs = scores_of(found), scores_of(expected)
    assert len(ours) == len(theirs) == len(found.token_ids) == len(expected.token_ids)
    for token, other, mine, right in zip(found.token_ids, expected.token_ids, ours, theirs, strict=True):
        assert_close(mine, right, close=close)
        if token != other:
            assert abs(right[token] - right[other]) < close, f"token {token} instead of {other}: {right}"
            return


def assert_close(found: Mapping[int, float], expected: Mapping[int, float], *, close: float = CLOSE) -> None:
    """Compares the likeliest tokens. Rounding may decide which one is the last of them."""
    assert len(found) == len(expected)
    for token in found.keys() | expected.keys():
        mine = found.get(token, min(found.values()))
        right = expected.get(token, min(expected.values()))
        assert abs(mine - right) < close, f"token {token}: {mine} and {right}"


def scores_of(answer: Answer) -> Sequence[Mapping[int, float]]:
    """For each output token, the log-probabilities of the likeliest tokens."""
    return [likeliest(update.scores) for update in answer.updates if update.scores is not None]


def likeliest(scores: Scores) -> dict[int, float]:
    [ids], [logprobs] = scores.top_ids, scores.top_logprobs
    return dict(zip(ids.tolist(), logprobs.tolist(), strict=True))
