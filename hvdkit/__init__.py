"""hvdkit: one recipe, for a ResNet or a GPT, under PyTorch, TensorFlow, Keras and MXNet over real Horovod.

The commands are functions here too, such as `hvdkit.train` (docs/python.md). Importing this package loads no framework,
no Horovod and no plotting library; a function is loaded when it is first used.
"""

__version__ = "0.1.0"

# Type checkers read __init__.pyi.
_LAZY = {
    **dict.fromkeys(("HvdkitError", "RequestError", "RunError", "Stopped"), "hvdkit.errors"),
    **dict.fromkeys(("train", "evaluate", "predict_images", "export", "compare", "parity", "profile"), "hvdkit.api"),
    **dict.fromkeys(("advise", "bench", "diff", "dry_run", "generate", "predict", "published_profile"), "hvdkit.api"),
    **dict.fromkeys(("memory", "submit", "sweep"), "hvdkit.api"),
}


def __getattr__(name: str) -> object:
    import importlib

    if name == "report":  # the package, which can be called
        return importlib.import_module("hvdkit.report")
    if name not in _LAZY:
        raise AttributeError(f"module 'hvdkit' has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY, "report"})
