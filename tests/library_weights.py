"""hvdkit's ResNets and GPT on files of weights that torchvision, timm and transformers write, against these libraries.

    PYTHON_WITH_THEM tests/library_weights.py write FOLDER
    PYTHONPATH=. .runtimes/pytorch/bin/python tests/library_weights.py compare FOLDER

Weights and running statistics are random. The second command prints the largest difference of the outputs in
evaluation mode, in units of the largest output, and fails where one is more than rounding.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

CLASSES = 7
BASIC = {"embedding_size": 64, "hidden_sizes": [64, 128, 256, 512], "depths": [2, 2, 2, 2], "layer_type": "basic"}
OUTPUTS = "outputs.safetensors"  # and the inputs `images` and `tokens`


def write(folder: Path) -> None:
    """Write a file or folder of weights for each model, named by library and model, and what it computes."""
    import timm
    import torchvision
    from transformers import GPT2Config, GPT2LMHeadModel, ResNetConfig, ResNetForImageClassification

    torch.manual_seed(1)
    outputs = {"images": torch.randn(2, 3, 64, 64), "tokens": torch.randint(0, 300, (2, 32))}
    for name in ("resnet18", "resnet34", "resnet50"):
        for library, make in (("torchvision", torchvision.models.get_model), ("timm", timm.create_model)):
            model = shaken(make(name, num_classes=CLASSES))
            save_file(model.state_dict(), folder / f"{library}-{name}")
            outputs[f"{library}-{name}"] = model(outputs["images"])
    for name, sizes in (("resnet18", BASIC), ("resnet50", {})):
        for shards in ("1GB", "10MB"):
            model = shaken(ResNetForImageClassification(ResNetConfig(num_labels=CLASSES, **sizes)))
            model.save_pretrained(folder / f"transformers-{shards}-{name}", max_shard_size=shards)
            outputs[f"transformers-{shards}-{name}"] = model(outputs["images"]).logits
    config = GPT2Config(vocab_size=300, n_positions=32, n_embd=64, n_layer=3, n_head=4, bos_token_id=0, eos_token_id=0)
    for dtype in (torch.float32, torch.bfloat16):
        language = shaken(GPT2LMHeadModel(config)).to(dtype)
        name = f"transformers-{str(dtype).removeprefix('torch.')}-gpt"
        language.save_pretrained(folder / name, max_shard_size="200KB")
        outputs[name] = language.float()(outputs["tokens"]).logits
    save_file(outputs, folder / OUTPUTS)


def shaken(model: torch.nn.Module) -> torch.nn.Module:
    """The model in evaluation mode, with random statistics, scales and shifts."""
    for name, tensor in model.state_dict().items():
        if name.endswith("running_var"):
            torch.nn.init.uniform_(tensor, 0.5, 1.5)
        elif tensor.is_floating_point() and tensor.ndim == 1:
            torch.nn.init.normal_(tensor, 0.5 if name.endswith("weight") else 0.0, 0.1)
    return model.eval()


def compare(folder: Path) -> None:
    """Read each file, and compare what hvdkit's model computes."""
    from hvdkit.checkpoint import weights
    from hvdkit.recipe.schema import GptModel
    from hvdkit.tasks import gpt, resnet

    outputs = load_file(folder / OUTPUTS)
    inputs = {"gpt": outputs.pop("tokens"), "resnet": outputs.pop("images")}
    sizes = {"layers": 3, "heads": 4, "width": 64, "context": 32, "vocabulary": 300}
    worst = 0.0
    for name, theirs in outputs.items():
        model = name.rpartition("-")[2]
        script = "gpt" if model == "gpt" else "resnet"
        table: Any = (
            gpt.architecture(GptModel(name="gpt", **sizes)) if model == "gpt" else resnet.architecture(model, CLASSES)
        )
        initial = table.initial_state(1)
        shapes = {tensor: value.shape for tensor, value in initial.items()}
        found = weights.read_fitting(folder / name, shapes, False, table).onto(initial)
        ours = built(script, table)
        ours.load_state_dict({tensor: torch.from_numpy(value) for tensor, value in found.items()}, strict=False)
        with torch.no_grad():
            computed = ours(inputs[script])
        error = float((getattr(computed, "logits", computed) - theirs).abs().max() / theirs.abs().max())
        worst = max(worst, error)
        print(f"{name:32} {error:.1e}")
    assert worst < 1e-5


def built(script: str, table: Any) -> torch.nn.Module:
    """The model that hvdkit trains under PyTorch."""
    path = Path(__file__).resolve().parent.parent / "recipes" / "pytorch" / f"{script}.py"
    spec = importlib.util.spec_from_file_location(script, path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    model: torch.nn.Module = module.build(table)
    return model.eval()


if __name__ == "__main__":
    with torch.no_grad():
        {"write": write, "compare": compare}[sys.argv[1]](Path(sys.argv[2]))
