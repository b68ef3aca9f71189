"""What other tools call a key of a recipe, a value or an option of hvdkit: the names that users type most.

Names are in small letters, with `_` for `-`. All others are compared with hvdkit's own (`hvdkit.errors.nearest`).
"""

from __future__ import annotations

# A key or, for a flag, a key with its value.
KEYS = {
    "lr": "optimizer.learning_rate",
    "wd": "optimizer.weight_decay",
    "optim": "optimizer.name",
    "max_grad_norm": "optimizer.clip_norm",
    "b": "batch_size",
    "bs": "batch_size",
    "per_device_train_batch_size": "batch_size",
    "gradient_accumulation_steps": "accumulate",
    "gradient_checkpointing": "recompute",
    "max_epochs": "epochs",
    "num_train_epochs": "epochs",
    "max_steps": "steps",
    "dataset": "data.name",
    "data_dir": "data.path",
    "j": "data.workers",
    "a": "model.name",
    "arch": "model.name",
    "num_classes": "model.classes",
    "lr_scheduler_type": "schedule.decay",
    "save_steps": "checkpoint.every_steps",
    "logging_steps": "log_every",
    "min_num_proc": "elastic.min_np",
    "max_num_proc": "elastic.max_np",
    "amp": "precision=fp16",
    "fp16": "precision=fp16",
    "bf16": "precision=bf16",
    "fp16_allreduce": "compression=fp16",
    "autotune": "tune=measure",
    "cuda": "device=gpu",
    "no_cuda": "device=cpu",
}
# An option, in which {} is the value.
OPTIONS = {
    "np": "-np {}",
    "num_proc": "-np {}",
    "nproc_per_node": "-np {}",
    "gpus": "-np {} device=gpu",
    "devices": "-np {} device=gpu",
    "hosts": "-H {}",
    "hostfile": "-H HOST:SLOTS,HOST:SLOTS",
    "nnodes": "-H HOST:SLOTS,HOST:SLOTS",
    "framework": "--framework {}",
    "launcher": "--launcher {}",
    "out": "--out {}",
    "output_dir": "--out {}",
    "resume": "--resume",
    "resume_from_checkpoint": "--out {} --resume",
    "overwrite": "--overwrite",
    "report_to": "--log {}",
    "dry_run": "--dry-run",
}
VALUES = {
    "cuda": "gpu",
    "float16": "fp16",
    "bfloat16": "bf16",
    "float32": "fp32",
    "float64": "fp64",
    "imagenet": "imagefolder",
}
# The commands of hvdkit that do what other tools call so.
COMMANDS = {"run": "train", "fit": "train", "eval": "evaluate", "test": "evaluate", "convert": "export"}
