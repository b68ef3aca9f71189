"""A checkpoint's model as one file that others read without hvdkit: safetensors, ONNX or a Keras archive."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import hvdkit
from hvdkit import paths
from hvdkit.checkpoint import snapshots
from hvdkit.checkpoint.snapshots import CheckpointRecord
from hvdkit.checkpoint.weights import save_weights
from hvdkit.commands import fields
from hvdkit.commands.checked_run import CheckedRun, launch, make_plan
from hvdkit.commands.request import Option, Request
from hvdkit.core.precision import PRECISIONS
from hvdkit.core.state import check_fits
from hvdkit.errors import Faults, HvdkitError, RequestError
from hvdkit.files import read_bounded, write_atomic
from hvdkit.launch.placement import Placement
from hvdkit.recipe import schema
from hvdkit.report.tabular import size
from hvdkit.tasks import gpt, resnet
from hvdkit.tasks.task import state_shapes

SAFETENSORS, ONNX, KERAS = ".safetensors", ".onnx", ".keras"
SUFFIXES = (SAFETENSORS, ONNX, KERAS)
_PRETRAINED = "model.safetensors"  # the name that transformers looks for
ABOUT = "hvdkit.json"  # the metadata in a Keras archive, which is a zip file
_COMPILED = "_orig_mod."  # in names of the tensors of a compiled module; the module itself has them without


@dataclass(frozen=True)
class ExportPlan:
    """An export that has passed every check that can be made before it starts.

    `state` has the parameters and running statistics, `table` is the architecture to build; None for a model of the
    user's own, and for a GPT. `averaged` says whether they are averaged weights. `beside` are the contents of the files
    by name that come beside `out`, to load it. `plan` is set where a runtime has to write.
    """

    out: Path
    record: CheckpointRecord
    state: snapshots.State
    table: resnet.ResNet | None
    averaged: bool = False
    beside: Mapping[str, bytes] = field(default_factory=dict)
    plan: CheckedRun | None = None


class ExportRequest(Request):
    """Write a model as one file, FILE.safetensors, FILE.onnx or FILE.keras; returns its absolute path.

    Of a run's folder it is the best checkpoint's, else the last one's.
    """

    checkpoint: fields.CheckpointFolder
    out: Annotated[Path, Option("FILE.safetensors, FILE.onnx or FILE.keras", metavar="FILE", positional=True)]
    average: fields.Average = True
    overwrite: Annotated[bool, Option("replace the file")] = False


def run(request: ExportRequest) -> ExportPlan:
    """Export. Raises RunError where the file cannot be written, and what the launcher raises."""
    checkpoint = snapshots.locate(paths.settled(request.checkpoint))
    checked = plan(checkpoint, request.out, request.overwrite, request.average)
    write(checked)
    return checked


def returned(result: ExportPlan) -> Path:
    """What the Python function returns."""
    return result.out


def lines(request: ExportRequest, result: ExportPlan) -> Iterator[str]:
    """Where it is, and how it is loaded."""
    out, what = request.out, "averaged weights written" if result.averaged else "written"
    yield f"{snapshots.locate(request.checkpoint)}: {what} to {out} ({size(out.stat().st_size)})"
    for name in result.beside:
        if name.endswith(".py"):
            module = name.removesuffix(".py")
            yield f"{name} beside it loads it: from {module} import load; model = load({out.name!r})"
    if "config.json" in result.beside:
        names = " and ".join(result.beside)
        yield f"{names} beside it; transformers loads it: GPT2LMHeadModel.from_pretrained({str(out.parent)!r})"


def plan(folder: Path, out: Path, overwrite: bool, average: bool = True) -> ExportPlan:
    """Check the checkpoint, the file's name, its place and its runtime. Raises RequestError with all faults.

    With `average` it exports the averaged weights, where the checkpoint has any.
    """
    faults = Faults()
    if not os.access(out.parent, os.W_OK | os.X_OK) or not out.parent.is_dir():
        faults.append(f"--out {out}: {out.parent} is no folder that can be written; make it, or choose another")
    elif out.is_dir():
        faults.append(f"--out {out}: expected a file, got a folder")
    elif out.parent.resolve() == folder.resolve():
        faults.append(f"--out {out}: it lies in the checkpoint, whose files stay as they are; choose another folder")
    elif out.exists() and not overwrite:
        faults.append(f"--out {out}: the file exists; add --overwrite or choose another one")
    planned, model = None, None
    with faults.collected(HvdkitError):
        checkpoint = snapshots.read(folder)
        state, averaged = checkpoint.model(average)
        state = {name.replace(_COMPILED, ""): value for name, value in state.items()}
        planned = ExportPlan(out.absolute(), checkpoint.record, state, None, averaged)
        recipe = schema.revise(checkpoint.record.recipe, f"{folder / snapshots.RECORD}: recipe")
        model = recipe.model
        if isinstance(model, schema.Model):
            planned = _with_architecture(planned, recipe, model, overwrite)
        elif isinstance(model, schema.GptModel):
            planned = _for_transformers(planned, recipe, model, overwrite)
        elif out.suffix != SAFETENSORS:
            raise RequestError(f"--out {out}: expected {SAFETENSORS}, the only file for a model of your own")
    if model is None or isinstance(model, schema.Model):  # others have one format, which is checked with them
        faults += _format_faults(out)
    faults.report()
    assert planned is not None
    return planned


def _format_faults(out: Path) -> list[str]:
    if out.suffix not in SUFFIXES or not out.stem:
        return [f"--out {out}: expected a file that ends in {', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]}"]
    if out.suffix == ONNX and find_spec("onnx") is None:
        return [f"--out {out}: the package onnx is missing; run `{sys.executable} -m pip install onnx`"]
    return []


def _with_architecture(plan: ExportPlan, recipe: schema.Recipe, model: schema.Model, overwrite: bool) -> ExportPlan:
    """The plan for a model that hvdkit knows. Raises RequestError if the weights or the place do not fit it."""
    stem = plan.state.get("conv1.weight")
    channels = stem.shape[1] if stem is not None and stem.ndim == 4 else 3
    # Exported models compute in the dtype of their parameters, also if training computed in another one.
    dtype = PRECISIONS[recipe.precision].parameters
    table = resnet.architecture(model.name, int(model.classes), channels)
    plan = replace(plan, table=replace(table, dtype=dtype, compute_dtype=dtype))
    check_fits(state_shapes(table), plan.state)
    if plan.out.suffix == KERAS:
        # One process writes the file on a CPU, however many have trained the model, on whatever devices.
        bare = schema.Recipe(name=recipe.name, model=model, data=recipe.data, optimizer=recipe.optimizer, device="cpu")
        return replace(plan, plan=make_plan(bare, "keras", Placement(), use="none"))
    if plan.out.suffix == SAFETENSORS:
        script = paths.script("pytorch", model.SCRIPT)
        beside = plan.out.with_name(script.name)
        there = beside.read_bytes() if beside.is_file() else None
        if there == script.read_bytes():
            return plan
        if os.path.lexists(beside) and (there is None or b"`hvdkit export`" not in there):
            raise RequestError(f"--out {plan.out}: {beside} is another file; choose another folder")
        if there is not None and not overwrite:
            raise RequestError(f"--out {plan.out}: {beside} is of another version; add --overwrite to replace it, too")
        return replace(plan, beside={script.name: script.read_bytes()})
    return plan


def _for_transformers(plan: ExportPlan, recipe: schema.Recipe, model: schema.GptModel, overwrite: bool) -> ExportPlan:
    """The plan for a GPT: a folder that transformers' `GPT2LMHeadModel.from_pretrained` reads. Raises RequestError."""
    if plan.out.name != _PRETRAINED:
        raise RequestError(
            f"--out {plan.out}: expected a file named {_PRETRAINED}, the only export of a GPT; transformers reads it "
            "with the config.json beside it"
        )
    table = gpt.architecture(model)
    check_fits(table.parameter_shapes(), plan.state)
    beside = {"config.json": (json.dumps(table.transformers_config(), indent=2) + "\n").encode()}
    tokens = getattr(recipe.data, "tokens", "bytes")
    if tokens != "bytes":
        try:
            beside["tokenizer.json"] = read_bounded(Path(tokens))
        except OSError as error:
            raise RequestError(
                f"data.tokens: {tokens}: cannot be read ({error.strerror}); put the file back"
            ) from error
    for name, content in beside.items():
        there = plan.out.with_name(name)
        if os.path.lexists(there) and not overwrite and not (there.is_file() and there.read_bytes() == content):
            raise RequestError(
                f"--out {plan.out}: {there} exists; add --overwrite to replace it, or choose a new folder"
            )
    return replace(plan, beside=beside)


def describe(record: CheckpointRecord, table: resnet.ResNet | None, averaged: bool = False) -> dict[str, Any]:
    """The metadata of an exported file, the same in each format; what is not known is left out.

    `recipe_sha256` is that of the checkpoint's recipe as JSON with sorted keys; `mean` and `std` are those of a pixel's
    channels, with pixels between 0 and 1.
    """
    about: dict[str, Any] = {"architecture": record.recipe["model"]["name"]}
    if table:
        about |= {"classes": table.classes, "channels": table.stem.inputs, "dtype": table.dtype}
    preprocessing = record.model_dump(include={"preprocessing"})["preprocessing"] or {}
    about |= {name: value for name, value in preprocessing.items() if value}
    return about | {
        "trained_with": f"{record.framework} {record.framework_version}, hvdkit {record.hvdkit_version}",
        **({"averaged": True} if averaged else {}),
        "step": record.progress.step,
        "epoch": record.progress.epoch,
        "recipe_sha256": hashlib.sha256(json.dumps(record.recipe, sort_keys=True).encode()).hexdigest(),
        "hvdkit_version": hvdkit.__version__,
    }


def _texts(about: Mapping[str, Any]) -> dict[str, str]:
    """Metadata for formats that hold texts only: all but texts as JSON."""
    return {name: value if isinstance(value, str) else json.dumps(value) for name, value in about.items()}


def write(plan: ExportPlan) -> list[Path]:
    """Write the file, whole or not at all; returns all files that were written.

    Raises RunError where it cannot be written, and what the launcher raises.
    """
    about = describe(plan.record, plan.table, plan.averaged)
    if plan.out.suffix == KERAS:
        _write_archive(plan, about)
    elif plan.out.suffix == ONNX:
        from hvdkit.tasks import resnet_onnx

        assert plan.table
        about |= {"layout": "NCHW", "dtype": "float32"}
        write_atomic(plan.out, resnet_onnx.model(plan.table, plan.state, _texts(about)))
    else:
        about |= {"layout": "NCHW", "table": asdict(plan.table)} if plan.table else {}
        for name, content in plan.beside.items():
            write_atomic(plan.out.with_name(name), content)
        save_weights(plan.state, plan.out, _texts(about))
    return [plan.out, *(plan.out.with_name(name) for name in plan.beside)]


def _write_archive(plan: ExportPlan, about: Mapping[str, Any]) -> None:
    assert plan.plan and plan.table
    script = paths.recipes() / plan.plan.framework / "export.py"
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        recipe, weights, making = folder / "config.yaml", folder / "weights.safetensors", folder / plan.out.name
        write_atomic(recipe, schema.dump(plan.plan.recipe))
        save_weights(plan.state, weights, {"table": json.dumps(asdict(plan.table))})
        launch(plan.plan.by(script), recipe, [str(weights), str(making)], folder / "logs")
        with zipfile.ZipFile(making, "a", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr(ABOUT, json.dumps({**about, "layout": "NHWC"}, indent=1))
        write_atomic(plan.out, making.read_bytes())
