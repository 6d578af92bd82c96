"""Prompts that wait for a step, not for another request's end: how much work they are, and which of them are short."""

from collections.abc import Sequence

from saccade.scheduling.pace import Backlog
from saccade.scheduling.request import Request, RequestQueue

TIMES_SHORTER = 4  # than what is left of a long prompt is one that is short beside it


def backlog_of(prefilling: Sequence[Request], waiting: RequestQueue, num_startable: int, now: float) -> Backlog:
    """Of all prompts that have begun, and of as many new ones as may begin."""
    share = min(num_startable / len(waiting), 1.0) if waiting else 0.0
    first = (*prefilling[:1], *([waiting.first] if share else ()))
    return Backlog(
        num_rows=int(share * waiting.num_prompt_tokens) + sum(request.num_left for request in prefilling),
        num_image_rows=int(share * waiting.num_media_rows) + sum(request.num_unencoded_rows for request in prefilling),
        waited_s=max((now - request.arrival for request in first), default=0.0),
    )


def most_rows_beside(
    prefilling: Sequence[Request], waiting: RequestQueue, num_startable: int, num_rows_left: int
) -> int:
    """The most rows of a prompt that is short beside the first one. 0 if that one fits into this step, or if no prompt
    of at least its priority is short. Of new ones the mean counts, because they begin in order."""
    if not prefilling or prefilling[0].num_left <= num_rows_left:
        return 0
    long, *others = prefilling
    lengths = [other.num_left for other in others if other.priority == long.priority]
    if waiting and num_startable and waiting.first.priority <= long.priority:
        lengths.append(waiting.num_prompt_tokens // len(waiting))
    most = long.num_left // TIMES_SHORTER
    return most if lengths and min(lengths) <= most else 0
