"""Whether an engine with work still makes progress, judging by its messages."""

from time import monotonic

STALLED_S = 10.0  # a healthy engine answers between two steps, and it is asked every few seconds
COMPILING_S = 5.0


class Liveness:
    def __init__(self) -> None:
        self._heard_at = monotonic()
        self._compile_wait_s = 0.0
        self.faults: list[str] = []  # permanent, though the engine keeps running

    def note_message(self) -> None:
        self._heard_at = monotonic()

    def note_compiling(self, wait_s: float) -> None:
        """`wait_s` is how long the oldest request that waits for its grammar has waited."""
        self._compile_wait_s = wait_s

    def troubles(self, *, has_work: bool) -> list[str]:
        """What is wrong now, in words that anybody may see."""
        found = [*self.faults]
        silence_s = monotonic() - self._heard_at
        if has_work and silence_s > STALLED_S:
            found.append(f"the engine has requests but has not finished a step for {silence_s:.0f} seconds")
        if has_work and self._compile_wait_s > COMPILING_S:
            found.append(f"requests have waited {self._compile_wait_s:.0f} seconds for their grammars to compile")
        return found
