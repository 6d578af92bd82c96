"""The base class of modes that intercept torch's operations."""

from torch.utils._python_dispatch import TorchDispatchMode


class OperationMode(TorchDispatchMode):
    """Subclasses define `__torch_dispatch__`. torch's compiler never sees them. By default torch would import it at the
    first operation just to exclude them, which takes two seconds in every process that captures a graph."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False
