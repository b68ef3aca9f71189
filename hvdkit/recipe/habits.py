"""What other tools call a key of a recipe, one of its values, or an option of hvdkit: data for `hints`.

The tools are horovodrun, torchrun and its examples, Lightning, Keras, Hugging Face's Trainer and timm. Names are in
small letters, with `_` for `-`.
"""

from __future__ import annotations


def _by_name(table: dict[str, str]) -> dict[str, str]:
    """The line of each name, of which the table has several after each line."""
    return {name: line for line, names in table.items() for name in names.split()}


KEYS = _by_name({
    "optimizer.learning_rate": "lr base_lr init_lr",
    "optimizer.weight_decay": "wd l2",
    "optimizer.name": "optim opt optimizer_type",
    "optimizer.clip_norm": "max_grad_norm gradient_clip_val gradient_clipping clip_grad clip_grad_norm clipnorm",
    "optimizer.beta1": "adam_beta1",
    "optimizer.beta2": "adam_beta2",
    "optimizer.epsilon": "adam_epsilon eps",
    "batch_size": "b bs batch per_device_train_batch_size per_device_batch_size train_batch_size micro_batch_size",
    "accumulate": "gradient_accumulation_steps accumulate_grad_batches grad_accum batches_per_allreduce "
                  "backward_passes_per_step",
    "recompute": "gradient_checkpointing activation_checkpointing",
    "epochs": "num_epochs max_epochs num_train_epochs n_epochs nb_epoch epoch",
    "steps": "max_steps max_iter iterations num_steps train_steps",
    "seed": "random_seed manual_seed random_state",
    "data.path": "data data_dir data_path train_dir",
    "data.name": "dataset dataset_name",
    "data.workers": "j workers num_workers dataloader_num_workers",
    "data.size": "image_size img_size input_size",
    "data.validation": "validation_split val_split",
    "model.name": "a arch model model_name net",
    "model.weights": "pretrained init_checkpoint",
    "model.classes": "num_classes num_labels",
    "schedule.decay": "lr_scheduler_type lr_scheduler scheduler sched",
    "schedule.warmup_epochs": "warmup",
    "loss.label_smoothing": "label_smoothing_factor smoothing",
    "checkpoint.every_epochs": "save_every save_freq",
    "checkpoint.every_steps": "save_steps",
    "checkpoint.keep": "save_total_limit save_top_k",
    "log_every": "logging_steps log_interval log_every_n_steps print_freq",
    "precision": "amp fp16 bf16 half mixed_precision dtype",
    "compression": "fp16_allreduce",
    "tune": "autotune",
    "device": "accelerator cuda use_cuda no_cuda use_cpu cpu gpu",
    "threads": "num_threads omp_num_threads",
    "elastic.min_np": "min_num_proc",
    "elastic.max_np": "max_num_proc",
})  # fmt: skip

# The values of flags: where they are given or true, and where they are false.
ON = _by_name({
    "fp16": "amp fp16 half mixed_precision fp16_allreduce", "bf16": "bf16", "gpu": "cuda use_cuda gpu",
    "cpu": "no_cuda use_cpu cpu", "measure": "autotune", "FILE.safetensors": "pretrained",
})  # fmt: skip
OFF = _by_name({
    "fp32": "amp fp16 bf16 half mixed_precision", "none": "fp16_allreduce autotune", "cpu": "cuda use_cuda gpu",
    "auto": "no_cuda use_cpu cpu",
})  # fmt: skip

# An option, in which {} is the value, or else a sentence.
OPTIONS = _by_name({
    "-np {}": "np n num_proc nproc nproc_per_node num_processes world_size size ranks ntasks n_procs",
    "-np {} device=gpu": "gpus num_gpus n_gpus ngpus n_gpu devices gpus_per_node",
    "-H {}": "host hosts",
    "-H HOST:SLOTS,HOST:SLOTS": "hostfile machinefile nodes nnodes num_nodes num_machines node_rank master_addr",
    "--framework {}": "framework",
    "--rival {}": "rival",
    "--launcher {}": "launcher",
    "expected the option --rival ddp for DistributedDataParallel; without it ranks communicate by Horovod":
        "strategy ddp",
    "--launcher horovodrun": "mpi use_mpi mpi_args ssh_port",
    "--out {}": "o out output output_dir log_dir logdir default_root_dir save_dir job_dir run_dir workdir",
    "--out {} --resume": "resume_from_checkpoint ckpt_path",
    "--resume": "resume",
    "--overwrite": "overwrite overwrite_output_dir force",
    "--log {}": "log report_to logger tracker",
    "--dry-run": "dry_run dryrun",
    "--stall-timeout {}": "stall_timeout stall_check_warning_time_seconds timeout",
    "the recipe is the first word, without an option": "config config_file config_name cfg recipe c",
    "hvdkit profile shows where the time goes": "timeline_filename profiler profile",
    "hvdkit evaluate RUN measures a run that has been trained": "evaluate eval do_eval test",
    "set the variable HOROVOD_FUSION_THRESHOLD, in bytes, or leave it to hvdkit":
        "fusion_threshold_mb fusion_threshold",
    "set the variable HOROVOD_CYCLE_TIME, or leave it to hvdkit": "cycle_time_ms cycle_time",
    "leave it out: ranks communicate by Horovod":
        "gloo use_gloo backend dist_backend dist_url distributed multiprocessing_distributed rdzv_backend "
        "rdzv_endpoint rdzv_id master_port standalone local_rank",
    "schedule.warmup_epochs counts the epochs of the warm-up": "warmup_ratio num_warmup_steps",
    "leave it out: training samples are shuffled in every epoch": "shuffle",
    "leave it out: hvdkit train trains and evaluates": "do_train fit train",
    "leave it out: lines or a bar of progress are always shown": "verbose v progress",
    "hvdkit has no such setting; steps=… bounds the whole run": "steps_per_epoch limit_train_batches",
    "hvdkit writes no callbacks; log_every, checkpoint and --log say what is kept": "callbacks",
})  # fmt: skip

VALUES: dict[str, dict[str, str]] = {
    "device": _by_name({"gpu": "cuda cuda:0 gpus nvidia rocm hip", "cpu": "cpus none", "auto": "any"}),
    "precision": _by_name({
        "fp16": "16 float16 half true amp 16-mixed 16-true mixed mixed_float16",
        "bf16": "bfloat16 bf16-mixed bf16-true mixed_bfloat16",
        "fp32": "32 float32 float single full 32-true false no none tf32",
        "fp64": "64 float64 double 64-true",
    }),
    "optimizer.name": _by_name({"adamw": "adam adamw_torch adamw_hf", "sgd": "momentum sgdm nesterov"}),
    "schedule.decay": _by_name({"step": "multistep steplr", "constant": "none no", "polynomial": "linear poly"}),
    "data.name": _by_name({"imagefolder": "imagenet folder images", "mnist5k": "mnist", "cifar10": "cifar"}),
    "model.name": {f"resnet{sign}{depth}": f"resnet{depth}" for sign in "-_" for depth in (18, 20, 34, 50, 101, 152)},
    "compression.method": _by_name({"topk": "dgc top_k top-k", "powersgd": "power_sgd", "fp16": "half float16"}),
    "tune": _by_name({"measure": "true auto", "none": "false off"}),
}  # fmt: skip

# The commands of hvdkit that do what other tools call so.
COMMANDS = _by_name({
    "train": "run fit launch start finetune resume", "evaluate": "eval test validate val",
    "export": "convert save onnx",
    "predict-images": "classify infer inference", "compare": "benchmark", "runtime build": "install setup build",
    "recipes list": "list ls", "doctor": "check env info", "predict": "simulate", "report": "plot show",
})  # fmt: skip
