"""The base of everything that looks at torch's operations one by one."""

from torch.utils._python_dispatch import TorchDispatchMode


class OperationMode(TorchDispatchMode):
    """Subclasses define `__torch_dispatch__`. Nothing here is compiled by torch, but to make sure of that, torch would
    import its compiler at the first operation: two seconds of every process that captures a graph."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False
