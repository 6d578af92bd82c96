"""Measures work in Python instructions, which do not depend on the load of the machine."""

import inspect
import sys
from collections.abc import Callable
from types import FrameType, ModuleType
from typing import Any


def num_opcodes(call: Callable[[], object], *modules: ModuleType) -> int:
    """The number of instructions that a call runs in these modules."""
    found = 0
    files = {inspect.getfile(module) for module in modules}

    def count(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal found
        if frame.f_code.co_filename not in files:
            return None
        frame.f_trace_opcodes = True
        found += event == "opcode"
        return count

    before = sys.gettrace()
    sys._getframe().f_trace_opcodes = True  # Python 3.12 looks for such a frame when tracing begins
    sys.settrace(count)
    try:
        call()
    finally:
        sys.settrace(before)
    return found
