"""The PyTorch runtime for GPUs, on a machine with nvcc and no GPU: `make gpu-check`.

It builds the runtime with CUDA and NCCL in a folder of its own in the cache (7 GB), and checks what
can be checked without a GPU: every symbol of Horovod's library is found in the framework's libraries, Horovod says that
it was built with CUDA and NCCL, two processes reduce on the CPU over Gloo (the proof of every runtime), and the doctor
says that no GPU is there. What it cannot check is that anything runs on a GPU.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from hvdkit.runtimes import cuda, machine, store

RUNTIMES = store.cache() / "gpu-check"
PYTHON = RUNTIMES / "pytorch" / "bin" / "python"
# With LD_BIND_NOW the loader resolves every symbol at once, and fails over one that is nowhere.
LOADED = "import horovod.torch as hvd; assert hvd.nccl_built() and hvd.cuda_built(); print('CUDA and NCCL built in')"


def main() -> int:
    """Build and check; returns the exit status."""
    environment = os.environ | {"HVDKIT_RUNTIMES": str(RUNTIMES)}
    found = cuda.find()
    print(f"CUDA: {found.nvcc or 'none'}; NCCL: {found.nccl or 'that of the framework'}", flush=True)
    run([sys.executable, "-m", "hvdkit", "runtime", "build", "pytorch", "--gpu"], environment)
    in_it = cuda.find(PYTHON)
    print(f"built with {in_it.nvcc} and {in_it.nccl}", flush=True)
    run([PYTHON, "-c", LOADED], environment | {"LD_BIND_NOW": "1"})
    doctor = subprocess.run([sys.executable, "-m", "hvdkit", "doctor"], env=environment, capture_output=True, text=True)
    said = next((line.strip() for line in doctor.stdout.splitlines() if "built for NCCL" in line), None)
    if not machine.gpus() and said is None:
        print(f"the doctor does not say that no GPU is there:\n{doctor.stdout}", file=sys.stderr)
        return 1
    print(said or "\n".join(machine.gpus()))
    print("nothing has run on a GPU")
    return 0


def run(command: list[str | Path], environment: dict[str, str]) -> None:
    """Run a command to its end; its failure is this program's."""
    if status := subprocess.run(command, env=environment).returncode:
        sys.exit(status)


if __name__ == "__main__":
    sys.exit(main())
