"""Maps a file as an array without a copy and without keeping a descriptor open. Python's `mmap` keeps one for each
mapping, and a server holds thousands of images."""

import ctypes
import mmap
import weakref

import numpy as np
import numpy.typing as npt

_FAILED = ctypes.c_void_p(-1).value


def map_file(file: int, num_bytes: int) -> npt.NDArray[np.uint8]:
    """A read-only array, unmapped when its last view is gone. The file must be sealed: reading one that shrinks kills
    the process."""
    if not num_bytes:
        return np.empty(0, np.uint8)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
    libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    # Older kernels refuse shared mappings of sealed files. Nothing is written, so a private one copies nothing.
    flags = mmap.MAP_PRIVATE | mmap.MAP_POPULATE
    address = libc.mmap(None, num_bytes, mmap.PROT_READ, flags, file, 0)
    if address is None or address == _FAILED:
        raise MemoryError(f"{num_bytes} bytes of a result cannot be mapped")
    memory = (ctypes.c_ubyte * num_bytes).from_address(address)
    weakref.finalize(memory, libc.munmap, address, num_bytes).atexit = False  # other threads may still read it at exit
    return np.frombuffer(memoryview(memory).toreadonly(), np.uint8)
