"""hvdkit: one recipe, for a ResNet or a GPT, under PyTorch, TensorFlow, Keras and MXNet over real Horovod.

The commands are functions here too, such as `hvdkit.train` (docs/python.md), and scripts of users need no other import:
`hvdkit.Own`, `hvdkit.run_task` (docs/own-model.md), or for a loop of their own `hvdkit.scaled`, `shard`, `mean`,
`checkpoints` (docs/own-scripts.md). Importing this package loads no framework, no Horovod and no NumPy;
a name is loaded when it is first used.
"""

__version__ = "1.0.0"

# Type checkers read __init__.pyi.
_LAZY = {
    **dict.fromkeys(("HvdkitError", "RequestError", "RunError", "Stopped"), "hvdkit.errors"),
    "dry_run": "hvdkit.commands.dry_run",
    "Own": "hvdkit.tasks.own",
    "Handler": "hvdkit.core.loop",
    "run_task": "hvdkit.worker.own_task",
    "Metrics": "hvdkit.tasks.task",
    **dict.fromkeys(("ArraySplit", "Batch"), "hvdkit.data.dataset"),
    **dict.fromkeys(("NativeJob", "NativePipeline"), "hvdkit.data.user_pipeline"),
    **dict.fromkeys(("scaled", "shard", "mean"), "hvdkit.adapters.own_loop"),
    "checkpoints": "hvdkit.adapters.own_checkpoints",
}
# Functions that are made of a module in hvdkit/commands/.
_COMMANDS = {
    *("train", "evaluate", "export", "compare", "parity", "predict_images", "diff", "generate", "submit", "bench"),
    *("predict", "sweep", "advise", "plan", "memory", "profile", "published_profile", "report"),
}


def __getattr__(name: str) -> object:
    import importlib

    if name == "report":  # the package, which can be called
        return importlib.import_module("hvdkit.report")
    if name in _COMMANDS:
        globals()[name] = _function(name)
        return globals()[name]
    if name not in _LAZY:
        raise AttributeError(f"module 'hvdkit' has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY[name]), name)


def _function(command: str) -> object:
    """The Python function of a command."""
    import importlib

    return importlib.import_module("hvdkit.commands.request").function(command)


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY, *_COMMANDS})
