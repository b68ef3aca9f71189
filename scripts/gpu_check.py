"""GPU builds of Horovod, on a machine with CUDA's compiler and no GPU: `make gpu-check`.

All lies in a folder of its own in the user's cache (10 GB); a second run takes up what the first has left.

- The runtimes whose CUDA is of nvcc's major version are built by `hvdkit runtime build --gpu`.
- PyTorch or TensorFlow for another CUDA: Horovod's wheel is built by the nvcc that is there, as a check of the sources.
  Such a wheel is for no use, and `hvdkit` refuses to build it.
- Both end with Horovod loaded, which finds every symbol in the framework's libraries or fails, and reducing on the CPU
  over Gloo in two processes.
- MXNet's CUDA wheel is not imported without a GPU's driver: the sources of its binding are compiled, and not linked.

Nothing here runs on a GPU.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console

from hvdkit.commands import horovod_wheel
from hvdkit.errors import HvdkitError
from hvdkit.runtimes import cuda, machine, patches, pins, store, target, wheel
from hvdkit.runtimes.process import BuildLog, Cancellation

FOLDER = store.cache() / "gpu-check"
SAID = "built for NCCL; no GPU here"
LOADED = "import horovod.{0} as hvd; assert hvd.nccl_built() and hvd.cuda_built(); print(hvd.__file__)"
GPU_OPERATIONS = ("ALLREDUCE", "ALLGATHER", "BROADCAST", "ALLTOALL", "REDUCESCATTER")
MXNET_OPTIONS = ("MSHADOW_USE_CUDA=1", "MXNET_USE_CUDA=1", "MSHADOW_USE_MKL=0", "MSHADOW_USE_F16C=0",
                 "MXNET_USE_MKLDNN=1", "MXNET_USE_ONEDNN=0")  # fmt: skip


def main() -> int:
    """Check all frameworks; returns the exit status."""
    nvcc = cuda.find().nvcc
    machine.refuse("gpu-check lacks", cuda.find().missing(nccl=False))
    assert nvcc is not None
    os.environ["HVDKIT_RUNTIMES"] = str(FOLDER / "runtimes")
    os.environ["XDG_CACHE_HOME"] = str(FOLDER / "cache")  # for wheels that must not be used
    say(f"CUDA {nvcc.version} in {nvcc.home}")
    for name, pin in pins.RUNTIMES.items():
        if pin.cuda == nvcc.major:
            built(name)
        elif name != "mxnet":
            compiled(name, nvcc)
        else:
            compiled_mxnet(nvcc)
    say("Nothing of this has run on a GPU.")
    return 0


def built(name: str) -> None:
    """Build the runtime `name` with CUDA and NCCL, and check it."""
    run(sys.executable, "-m", "hvdkit", "runtime", "build", name, "--gpu")
    loaded(name, store.python_of(name))
    doctor = run(sys.executable, "-m", "hvdkit", "doctor", captured=True)
    if not machine.gpus() and not re.search(rf"{name}\b.*: {SAID}", doctor):
        sys.exit(f"the doctor does not say '{name}: {SAID}':\n{doctor}")
    versions = target.versions(store.python_of(name))
    say(f"{name}: {versions[pins.RUNTIMES[name].module]}: built, loads, reduces on the CPU. The doctor: {SAID}")


def compiled(name: str, nvcc: cuda.Installed) -> None:
    """Build and prove Horovod's wheel with an nvcc of another CUDA than that of the framework."""
    pin, place = pins.RUNTIMES[name], FOLDER / f"{name}-compiled"
    python = place / "bin" / "python"
    # Of the CUDA libraries that the framework asks for, the build needs NCCL alone.
    packages = [pin.gpu_packages[0].replace("[and-cuda]", ""), f"nvidia-nccl-cu{pin.cuda}", *pin.shared_packages]
    with BuildLog(FOLDER / f"{name}.log", Cancellation()) as log:
        say(f"{name}: installing {packages[0]}")
        log.run("making the environment", [machine.python_for(name) or sys.executable, "-m", "venv", place])
        log.install("installing the framework", python, *packages)
        found = target.find(python, gpu=False)
        made = horovod_wheel.proved(target.Target(python, found.versions, gpu=True), Console(stderr=True))
        log.install("installing Horovod", python, "--force-reinstall", "--no-deps", made)
        log.install("installing what Horovod needs", python, made)
    loaded(name, python)
    say(f"{name}: {found.describe()} for CUDA {pin.cuda}: compiled with CUDA {nvcc.version}, loads, reduces on the CPU")


def loaded(name: str, python: Path) -> None:
    """Load Horovod, with all symbols at once, and look whether it searches libraries only in folders that stay."""
    module = pins.RUNTIMES[name].module
    init = run(python, "-c", LOADED.format(module), captured=True, LD_BIND_NOW="1", TF_CPP_MIN_LOG_LEVEL="3")
    init = init.splitlines()[-1]
    for library in Path(init).parent.glob("mpi_lib*.so"):
        path = re.search(r"R(?:UN)?PATH\).*\[(.*)\]", run("readelf", "-d", library, captured=True))
        if gone := [folder for folder in (path[1].split(":") if path else []) if folder and not Path(folder).is_dir()]:
            sys.exit(f"{library}: looks for libraries in {', '.join(gone)}, which is no folder")


def compiled_mxnet(nvcc: cuda.Installed) -> None:
    """Compile the sources of Horovod's binding to MXNet for CUDA, with the headers of MXNet's CPU wheel."""
    pin, place = pins.RUNTIMES["mxnet"], FOLDER / "mxnet-headers"
    wanted = ("--no-deps", "--upgrade", "--target", place, *pin.cpu_packages)
    pytorch = cuda.packages(store.python_of("pytorch"))
    nccl = next((folder / "nccl" / "include" for folder in pytorch if (folder / "nccl").is_dir()), Path("/usr/include"))
    # CUDA's folder comes first; cuBLAS and the like may be in PyTorch's runtime alone.
    system = [place / "mxnet" / "include", place / "mxnet" / "include" / "mkldnn", nvcc.home / "include", nccl]
    system += [include for folder in pytorch for include in folder.glob("cu*/include")]
    defines = [f"HOROVOD_GPU_{operation}={ord('N')}" for operation in GPU_OPERATIONS]
    defines += ["HAVE_GLOO=1", "HAVE_NCCL=1", "HAVE_CUDA=1", "HAVE_GPU=1", "EIGEN_MPL2_ONLY=1", *MXNET_OPTIONS]
    with tempfile.TemporaryDirectory(prefix="hvdkit-mxnet-") as folder:
        with BuildLog(FOLDER / "mxnet.log", Cancellation()) as log:
            log.install("fetching MXNet's headers", Path(sys.executable), *wanted)
            source = wheel.unpack(wheel.sdist(Path(sys.executable), Path(folder), log), Path(folder))
        patches.apply(source, patches.chosen({pin.module: pin.version(gpu=True)}))
        parts = source / "third_party"
        own = [*parts.glob("*/include"), *parts.glob("boost/*/include"), parts / "eigen", parts / "gloo"]
        options = ["-std=c++17", "-fsyntax-only", "-w", *(f"-D{define}" for define in defines)]
        options += [*(f"-I{folder}" for folder in own), *(f"-isystem{folder}" for folder in system)]
        sources = sorted((source / "horovod" / "mxnet").glob("*.cc"))
        for file in sources:
            run(*(os.environ.get("CXX") or "c++").split(), *options, file)
    names = ", ".join(file.name for file in sources)
    say(f"mxnet, for CUDA {pin.cuda}: {names} compile with the headers of CUDA {nvcc.version}; nothing is linked")


def run(*command: str | Path, captured: bool = False, **variables: str) -> str:
    """Run a command to its end and return what it printed, if `captured`; its failure is this program's."""
    done = subprocess.run(
        command, env=os.environ | variables, stdout=subprocess.PIPE if captured else None, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))[:300]}: exit status {done.returncode}\n{done.stdout or ''}".rstrip())
    return done.stdout or ""


def say(text: str) -> None:
    """Print a line of the result."""
    print(f"gpu-check: {text}", flush=True)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except HvdkitError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
