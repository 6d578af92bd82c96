"""The backlog: prompts that the next step could work on, how much work they are, and which of them count as short.
Prompts that can start only when another request ends are not part of it."""

from collections.abc import Sequence

from saccade.scheduling.pace import Backlog
from saccade.scheduling.request import Request, RequestQueue

TIMES_SHORTER = 4  # a short prompt has at most a quarter of the rows that the long one has left


def backlog_of(prefilling: Sequence[Request], waiting: RequestQueue, num_startable: int, now: float) -> Backlog:
    """Counts all prompts that have started, and waiting ones in proportion to how many of them can start."""
    share = min(num_startable / len(waiting), 1.0) if waiting else 0.0
    first_waiting = (waiting.first,) if share else ()
    first = (*prefilling[:1], *first_waiting)
    unencoded = [rows for request in prefilling for rows in request.unencoded_rows]
    next_items = unencoded or [rows for request in first_waiting for rows in request.unencoded_rows]
    return Backlog(
        num_rows=int(share * waiting.num_prompt_tokens) + sum(request.num_left for request in prefilling),
        num_image_rows=int(share * waiting.num_media_rows) + sum(unencoded),
        waited_s=max((now - request.arrival for request in first), default=0.0),
        next_image_rows=next_items[0] if next_items else 0,
    )


def short_prompt_limit(
    prefilling: Sequence[Request], waiting: RequestQueue, num_startable: int, num_rows_left: int
) -> int:
    """How many rows a prompt may have to count as short next to the first one. 0 if the first one fits into this step,
    or if none of the same or a better priority is short. For waiting prompts the mean counts: they start in order."""
    if not prefilling or prefilling[0].num_left <= num_rows_left:
        return 0
    long, *others = prefilling
    lengths = [other.num_left for other in others if other.priority == long.priority]
    if waiting and num_startable and waiting.first.priority <= long.priority:
        lengths.append(waiting.num_prompt_tokens // len(waiting))
    limit = long.num_left // TIMES_SHORTER
    return limit if lengths and min(lengths) <= limit else 0
