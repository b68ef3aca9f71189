"""How the error of a process reads that lacks memory, of Python, NumPy, the frameworks and the kernel."""

import re

OUT_OF_MEMORY = re.compile(
    r"MemoryError|[Oo]ut of memory|OutOfMemory|OOM when allocating|ResourceExhausted|bad_alloc"
    r"|[Cc]an(not|'t) allocate memory|[Nn]ot enough memory|Memory allocation failed|Failed to allocate CPU Memory"
)
