"""The logits of recipes/pytorch/gpt.py against those of transformers' GPT2LMHeadModel, in an interpreter that has both:

    PYTHONPATH=. PYTHON tests/gpt_in_transformers.py FOLDER

Weights go from transformers' file to ours, with `transformer.` before their names and without, and back.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import torch
from safetensors.numpy import load_file, save_file
from transformers import GPT2Config, GPT2LMHeadModel

from hvdkit.checkpoint import weights
from hvdkit.recipe.schema import GPT
from hvdkit.tasks import gpt


def main(folder: Path) -> None:
    """Raise AssertionError where logits differ by more than rounding."""
    script = Path(__file__).resolve().parent.parent / "recipes" / "pytorch" / "gpt.py"
    spec = importlib.util.spec_from_file_location("gpt", script)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    table = gpt.architecture(GPT(name="gpt", layers=3, heads=4, width=64, context=32, vocabulary=300))
    torch.manual_seed(1)
    sizes = GPT2Config(vocab_size=300, n_positions=32, n_embd=64, n_layer=3, n_head=4, bos_token_id=0, eos_token_id=0)
    theirs = GPT2LMHeadModel(sizes).eval()
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    theirs.save_pretrained(folder)
    file, bare = folder / "model.safetensors", folder / "bare.safetensors"
    save_file({name.removeprefix("transformer."): value for name, value in load_file(file).items()}, bare)
    tokens = torch.randint(0, 300, (2, 32))
    for path in (file, bare):
        given = weights.read_fitting(path, table.parameter_shapes(), False, table).onto(table.initial_state(1))
        for dtype, limit in ((torch.float32, 1e-5), (torch.float64, 1e-11)):
            ours = module.build(table).to(dtype).eval()
            ours.load_state_dict({name: torch.from_numpy(value) for name, value in given.items()})
            back = GPT2LMHeadModel(sizes).to(dtype).eval()
            assert back.load_state_dict(ours.state_dict(), strict=False).missing_keys == ["lm_head.weight"]
            back.tie_weights()
            with torch.no_grad():
                logits = [model(tokens) for model in (ours, theirs.to(dtype), back)]
            for other in logits[1:]:
                assert (other.logits - logits[0]).abs().max() <= limit, dtype
    exported = folder / "exported"
    exported.mkdir()
    (exported / "config.json").write_text(json.dumps(table.transformers_config()))
    weights.save_weights(given, exported / "model.safetensors")
    with torch.no_grad():
        logits = [GPT2LMHeadModel.from_pretrained(exported).eval()(tokens).logits, theirs.float()(tokens).logits]
    assert (logits[0] - logits[1]).abs().max() <= 1e-5
    print("the same logits")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
