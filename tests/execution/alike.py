"""Whether two engines gave the same answers."""

from collections.abc import Mapping, Sequence

from saccade.wire.update import Scores
from tests.engine.rig import Answer

CLOSE = 1e-4  # of log-probabilities


def assert_alike(found: Answer, expected: Answer, *, close: float = CLOSE) -> None:
    """The same tokens, and log-probabilities of the likeliest that are `close`. Where the likeliest two are as close as
    that, either may be taken, and the answers go apart."""
    assert found.finish == expected.finish
    ours, theirs = scores_of(found), scores_of(expected)
    assert len(ours) == len(theirs) == len(found.token_ids) == len(expected.token_ids)
    for token, other, mine, right in zip(found.token_ids, expected.token_ids, ours, theirs, strict=True):
        assert_close(mine, right, close=close)
        if token != other:
            assert abs(right[token] - right[other]) < close, f"token {token} instead of {other}: {right}"
            return


def assert_close(found: Mapping[int, float], expected: Mapping[int, float], *, close: float = CLOSE) -> None:
    """Of the likeliest tokens; which is the last of them may be a matter of rounding."""
    assert len(found) == len(expected)
    for token in found.keys() | expected.keys():
        mine = found.get(token, min(found.values()))
        right = expected.get(token, min(expected.values()))
        assert abs(mine - right) < close, f"token {token}: {mine} and {right}"


def scores_of(answer: Answer) -> Sequence[Mapping[int, float]]:
    """By token, the log-probabilities of the likeliest ones."""
    return [likeliest(update.scores) for update in answer.updates if update.scores is not None]


def likeliest(scores: Scores) -> dict[int, float]:
    [ids], [logprobs] = scores.top_ids, scores.top_logprobs
    return dict(zip(ids.tolist(), logprobs.tolist(), strict=True))
