"""How long a pure read of so many bytes takes: what bounds a token that needs them all. Standard library only."""

import ctypes
import mmap
import time
from concurrent.futures import ThreadPoolExecutor

GROUPS, READS = 5, 4
FILL = 0x55  # anything but 0: untouched pages would all be one page of zeros


def read_seconds(count: int, threads: int) -> list[float]:
    """Seconds of a read of ``count`` bytes by ``threads`` threads, a part each: means over READS of them, GROUPS times.

    The C library's memchr looks for a byte that is not there, with the widest loads that the processor has, and ctypes lets go of
    Python's lock meanwhile.
    """
    memory = mmap.mmap(-1, count)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    holder = ctypes.c_char.from_buffer(memory)
    start = ctypes.addressof(holder)
    ctypes.memset(start, FILL, count)
    memchr = ctypes.CDLL(None).memchr
    memchr.argtypes, memchr.restype = (ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t), ctypes.c_void_p
    bounds = [count * part // threads for part in range(threads + 1)]
    parts = [(start + a, b - a) for a, b in zip(bounds, bounds[1:], strict=False)]

    def read(part: tuple[int, int]) -> None:
        for _ in range(READS):
            if memchr(part[0], FILL ^ 0xFF, part[1]) is not None:
                raise AssertionError("found a byte that was never written")

    seconds = []
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(GROUPS):
            began = time.perf_counter()
            list(pool.map(read, parts))
            seconds.append((time.perf_counter() - began) / READS)
    del holder
    memory.close()
    return seconds
