"""The jobs in examples/slurm/, by the `hvdkit submit` lines of its README, and the notebook's outputs.

`python -m scripts.schemas` writes the jobs, and tests/test_examples.py compares. `python -m scripts.examples` executes
the notebook and keeps its outputs; it needs the runtime of PyTorch.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"
# What a cluster would have in place of this machine's folders.
CHECKOUT, PROJECT = "/shared/hvdkit", "/shared/project"


def jobs() -> dict[Path, str]:
    """The jobs by their files, each as its line of examples/slurm/README.md writes it."""
    made = {}
    for line in re.findall(r"^hvdkit (submit .*)$", (EXAMPLES / "slurm" / "README.md").read_text(), re.MULTILINE):
        with tempfile.TemporaryDirectory() as folder:
            words = [word.replace("examples/", f"{EXAMPLES}/") for word in shlex.split(line)]
            done = subprocess.run(
                [sys.executable, "-m", "hvdkit", *words], cwd=folder, check=True, capture_output=True, text=True
            )
            assert done.stdout.startswith("written to "), done.stdout
            (job,) = Path(folder).glob("*.sbatch")
            text = job.read_text().replace(sys.executable, f"{CHECKOUT}/.venv/bin/python")
            text = text.replace(str(Path(folder).resolve()), PROJECT).replace(str(ROOT), CHECKOUT)
            made[EXAMPLES / "slurm" / job.name] = text
    return made


def executed(notebook: Any, folder: Path) -> Any:
    """The notebook after all cells have run in an empty folder, without what only this machine has."""
    from nbclient import NotebookClient

    NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(folder)}}).execute()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # times
        for output in cell.get("outputs", []):
            output.get("data", {}).pop("application/vnd.jupyter.widget-view+json", None)
    return notebook


if __name__ == "__main__":
    import nbformat

    file = EXAMPLES / "notebook.ipynb"
    with tempfile.TemporaryDirectory() as empty:
        nbformat.write(executed(nbformat.read(file, as_version=4), Path(empty)), file)
