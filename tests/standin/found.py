"""What one case reports to the process that started it."""

import msgspec


class Found(msgspec.Struct):
    violations: list[str] = []
    failures: list[str] = []  # errors of the start and of calls
    compiled: list[str] = []  # Triton kernels that were compiled after the engine was ready
    num_modules: int = 0  # loaded after that
    num_mallocs: int = 0
    num_replays: int = 0
    nodes: dict[str, list[str]] = {}  # of each graph, by its key

    def problems(self) -> list[str]:
        compiled = [f"compiled after ready: {name}" for name in self.compiled]
        counts = {"modules loaded": self.num_modules, "calls of cudaMalloc": self.num_mallocs}
        late = [f"{number} {what} after ready" for what, number in counts.items() if number]
        idle = [] if self.num_replays else ["no graph was replayed"]
        return [*(f"violation: {one}" for one in self.violations), *self.failures, *compiled, *late, *idle]
