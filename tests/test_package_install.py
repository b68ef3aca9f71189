"""The package as a stranger gets it: built, installed outside of the checkout, with recipes, a runtime and a run.

And the commands for recipes, which work the same in a checkout.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from email import message_from_string
from pathlib import Path
from urllib.parse import urlparse

import pytest

from hvdkit.runtimes.store import find
from scripts import release
from tests import hygiene
from tests.conftest import ROOT, Hvdkit, run

pytestmark = pytest.mark.long

RECIPE = "resnet20-digits"
SHIPPED = sorted(
    path.relative_to(ROOT / "recipes")
    for pattern in ("*.yaml", "*.json", "*/*.py")
    for path in (ROOT / "recipes").glob(pattern)
)


def finish(command: list[str | Path], cwd: Path, timeout: float, **environment: str) -> str:
    """Run a command that must succeed, with nothing of this environment's own in its way; what it prints."""
    inherited = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "HVDKIT_RUNTIMES")}
    done = run([str(word) for word in command], timeout, cwd=cwd, env=inherited | environment)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The sdist of the checkout, and the wheel built from that sdist alone."""
    folder = tmp_path_factory.mktemp("dist")
    made = release.build(ROOT, folder)
    assert finish(["sha256sum", "--check", "--quiet", release.SUMS], folder, 60) == ""
    return made


def test_the_wheel_holds_the_package_and_its_recipes(packages: tuple[Path, Path]) -> None:
    with zipfile.ZipFile(packages[1]) as wheel:
        names = set(wheel.namelist())
        folder = next(name.split("/")[0] for name in names if ".dist-info/" in name)
        programs = {"hvdkit/launch/bin/srun", "hvdkit/launch/bin/scontrol"}  # of `hvdkit hosts`
        assert all(wheel.getinfo(name).external_attr >> 16 & 0o111 == 0o111 for name in programs), "they can be run"
        metadata = message_from_string(wheel.read(f"{folder}/METADATA").decode())
    code = {str(path.relative_to(ROOT)) for path in (ROOT / "hvdkit").rglob("*.py")}
    folders = [ROOT / "hvdkit" / room / "templates" for room in ("report", "launch/submission")]
    templates = {str(path.relative_to(ROOT)) for folder in folders for path in folder.iterdir()}
    clusters = {str(path.relative_to(ROOT)) for path in (ROOT / "hvdkit" / "simulator").rglob("*.yaml")}
    clusters.add("hvdkit/simulator/clusters/cluster.schema.json")
    constraints = {str(path.relative_to(ROOT)) for path in (ROOT / "hvdkit" / "runtimes" / "constraints").iterdir()}
    patches = {str(path.relative_to(ROOT)) for path in (ROOT / "hvdkit" / "runtimes" / "patches").iterdir()}
    recipes = {f"hvdkit/recipes/{path}" for path in SHIPPED}
    assert len(recipes) >= 5
    assert len(constraints) == 4
    assert len(patches) >= 13
    assert len(templates) == 7 + 6
    others = {"hvdkit/__init__.pyi", "hvdkit/py.typed"}
    assert {name for name in names if ".dist-info/" not in name} == (
        code | templates | clusters | constraints | patches | recipes | programs | others
    )
    assert any(name.endswith("/LICENSE") for name in names)
    assert metadata["Name"] == "hvdkit"
    assert metadata["Requires-Python"] == ">=3.11"


def test_the_sdist_holds_what_the_checkout_is_built_and_tested_from(packages: tuple[Path, Path]) -> None:
    with tarfile.open(packages[0]) as sdist:
        held = {name.split("/", 1)[1] for name in sdist.getnames() if "/" in name}
    tracked = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, timeout=hygiene.patience(30)
    )
    if tracked.returncode:
        pytest.fail(f"needs a git checkout to compare with: {tracked.stderr}")
    missing = {name for name in tracked.stdout.splitlines() if (ROOT / name).is_file()} - held
    assert {name for name in missing if not name.startswith(".ci/")} == {".gitignore"}


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["sdist", "wheel"])
def test_installed_elsewhere_it_serves_the_first_hour(packages: tuple[Path, Path], kind: str, tmp_path: Path) -> None:
    """Nothing comes from the checkout but one wheel of Horovod, in a folder: the cache of this user is out of sight."""
    finish([sys.executable, "-m", "venv", tmp_path / "venv"], tmp_path, 60)
    bin_ = tmp_path / "venv" / "bin"
    finish([bin_ / "pip", "install", "--quiet", packages[kind == "wheel"]], tmp_path, 180)
    (away := tmp_path / "away").mkdir()
    elsewhere = {"XDG_DATA_HOME": str(tmp_path / "data"), "XDG_CACHE_HOME": str(tmp_path / "cache")}

    def hvdkit(*words: str | Path, timeout: float = 60, **environment: str) -> str:
        return finish([bin_ / "hvdkit", *words], away, timeout, PYTHONSAFEPATH="1", **(elsewhere | environment))

    assert hvdkit("--version") == f"hvdkit {release.version_of(ROOT)}\n"
    assert "recipes" in hvdkit("--help")
    assert RECIPE in hvdkit("recipes", "list")
    hvdkit("recipes", "copy", RECIPE, "mine.yaml")
    first = (away / "mine.yaml").read_text().partition("\n")[0]
    assert urlparse(first.partition("$schema=")[2]).path.startswith(str(tmp_path / "venv"))
    speed = ("--images-per-second", "2470", "--batch-size", "256", "--device", "a100")
    hvdkit("profile", "--from", "resnet50", *speed, "--out", "a100")
    assert "images/s" in hvdkit("predict", "a100/profile.json", "--cluster", "a100-nvlink-ib", "-n", "8")
    assert "optimizer" in hvdkit("memory", "gpt2", "-n", "8", "--device", "h100")
    if kind == "sdist":
        return

    cache = {"XDG_CACHE_HOME": os.environ.get("XDG_CACHE_HOME", "")}  # where `make runtimes` has put Horovod's wheels
    hvdkit("horovod", "wheel", "--python", find("mxnet").python, "--cpu", "--out", "wheels", timeout=200, **cache)
    hvdkit("runtime", "build", "mxnet", "--cpu", "--find-links", "wheels", timeout=400)
    assert (tmp_path / "data" / "hvdkit" / "runtimes" / "mxnet" / "runtime.json").is_file()
    assert not list((tmp_path / "cache").rglob("horovod*")), "nothing was fetched or compiled"
    short = ["data={name: synthetic, height: 32, width: 32, train_images: 16}", "batch_size=4", "epochs=1"]
    train = ["train", "mine.yaml", "--framework", "mxnet", "-np", "2", "--out", "run", *short, "device=cpu"]
    assert "name: resnet20-digits" in hvdkit(*train, "--dry-run")
    assert "images" in hvdkit(*train, timeout=120)
    assert (away / "run" / "result.json").is_file()
    hvdkit("report", "run")
    assert "<html" in (away / "run" / "report.html").read_text()


def test_a_recipe_is_listed_copied_and_found_by_its_name(hvdkit: Hvdkit, tmp_path: Path) -> None:
    listed = hvdkit("recipes", "list").stdout
    assert f"{RECIPE}: ResNet-20 on the 1,797 handwritten digits" in listed

    copied = hvdkit("recipes", "copy", RECIPE)
    assert copied.returncode == 0, copied.stderr
    first, rest = (tmp_path / f"{RECIPE}.yaml").read_text().split("\n", 1)
    assert rest == (ROOT / "recipes" / f"{RECIPE}.yaml").read_text().split("\n", 1)[1]
    assert Path(urlparse(first.partition("$schema=")[2]).path).is_file(), "the schema is installed too"
    assert hvdkit("recipes", "copy", "keras", "mine").returncode == 0
    script = tmp_path / "mine" / "keras" / "resnet.py"
    assert script.read_bytes() == (ROOT / "recipes" / "keras" / "resnet.py").read_bytes()

    # A known name passes on to the next fault; the framework is unknown, so that nothing is started.
    by_name = hvdkit("train", RECIPE, "--framework", "none")
    assert by_name.returncode == 2
    assert "unknown framework 'none'" in by_name.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["recipes", "copy", RECIPE, "full"], "is there already and is not overwritten"),
        (["recipes", "copy", "kerras"], "did you mean 'keras'?"),
        (["recipes", "copy", "keras", "full/resnet20-digits.yaml"], "cannot be written (Not a directory)"),
        (["train", "resnet20-digit"], "did you mean 'resnet20-digits'?"),
        (["train", "../recipes/nowhere.yaml"], "no such file"),
    ],
)
def test_bad_requests_about_recipes(inside: Hvdkit, tmp_path: Path, arguments: list[str], message: str) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / f"{RECIPE}.yaml").write_text("mine\n")
    done = inside(*arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert (tmp_path / "full" / f"{RECIPE}.yaml").read_text() == "mine\n"
