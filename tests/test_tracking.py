"""What W&B and MLflow get of a run (`--log`), in their offline modes, through failures and resumptions too."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import struct
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import mlflow
import psutil
import pytest
from wandb.proto.wandb_internal_pb2 import Record

from hvdkit.commands import run_order
from hvdkit.commands.checked_run import make_plan
from hvdkit.errors import RequestError, RunError
from hvdkit.launch.placement import Placement
from hvdkit.recipe import schema
from hvdkit.results.train import read_metrics, read_result
from hvdkit.tracking import trackers
from hvdkit.tracking.trackers import Trackers
from tests import hygiene, paced
from tests.conftest import ROOT, Hvdkit
from tests.launching import wait_until
from tests.resuming import by_tag, under_way

pytestmark = pytest.mark.long

RUN = ROOT / "tests" / "data" / "comparison" / "runs" / "pytorch-np2"
SECRET = "0123456789abcdef0123456789abcdef01234567"
Points = dict[str, list[tuple[int, float]]]


@pytest.fixture(autouse=True)
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(("WANDB_", "MLFLOW_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_API_KEY", SECRET)
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    for name in ("WANDB_INIT_TIMEOUT", "WANDB_X_SERVICE_WAIT"):
        monkeypatch.setenv(name, str(hygiene.patience(60)))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder of a real run that has ended."""
    return Path(shutil.copytree(RUN, tmp_path / "run"))


def begun(folder: Path) -> trackers.TrackedRun:
    recipe = schema.load(folder / "config.yaml").model_dump(mode="json")
    return trackers.TrackedRun(folder, recipe | {"framework": "pytorch", "np": 2})


def logged(folder: Path, name: str, until: int, error: BaseException | None = None) -> list[str]:
    """Log a run that ends with the error behind its first lines; returns what is said of it."""
    said: list[str] = []
    with contextlib.suppress(type(error) if error else ()), Trackers([name], said.append) as opened:
        opened.begin(begun(folder))
        for line in list(read_metrics(folder / "metrics.jsonl"))[:until]:
            opened.log(line)
        if error:
            raise error
    return said


class Offline:
    """What the offline files of W&B below a folder hold, all parts of one run together."""

    def __init__(self, folder: Path) -> None:
        records = [
            record for path in sorted(folder.glob("tracking/wandb/offline-run-*/*.wandb")) for record in _records(path)
        ]
        self.ids = {record.run.run_id for record in records if record.HasField("run")}
        self.config: dict[str, Any] = {}
        self.summary: dict[str, Any] = {}
        self.points: Points = {}
        self.exits = [record.exit.exit_code for record in records if record.HasField("exit")]
        self.files = {file.path for record in records if record.HasField("files") for file in record.files.files}
        for record in records:
            for update in (*record.run.config.update, *record.config.update):
                self.config[update.key] = json.loads(update.value_json)
            for item in record.summary.update:
                self.summary[item.key or ".".join(item.nested_key)] = json.loads(item.value_json)
            values = {
                item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in record.history.item
            }
            for tag, value in values.items():
                if "/" in tag:
                    self.points.setdefault(tag, []).append((values["step"], value))


def _records(path: Path) -> Iterator[Record]:
    """The records of a .wandb file: LevelDB's log format behind a header of seven bytes."""
    data, place, parts = path.read_bytes(), 7, b""
    while place + 7 <= len(data):
        if 2**15 - place % 2**15 < 7:  # a record's header never spans two blocks
            place += 2**15 - place % 2**15
            continue
        _, length, kind = struct.unpack_from("<IHB", data, place)
        parts += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # the whole of a record, or its last part
            yield Record.FromString(parts)
            parts = b""


def run_of(folder: Path) -> tuple[Any, Points]:
    """The only run that MLflow has, and its metrics by tag."""
    store = mlflow.MlflowClient()
    (found,) = store.search_runs([store.get_experiment_by_name("hvdkit").experiment_id])
    points = {
        tag: [(metric.step, metric.value) for metric in store.get_metric_history(found.info.run_id, tag)]
        for tag in found.data.metrics
        if "/" in tag
    }
    return found, points


@pytest.mark.check
def test_wandb_gets_settings_metrics_summary_and_files(folder: Path) -> None:
    said = logged(folder, "wandb", until=4)  # the rest is read at the end
    assert len(said) == 1 and f"wandb sync {folder}/tracking/wandb/offline-run-*" in said[0]
    found, result = Offline(folder), read_result(folder / "result.json")
    assert found.points == by_tag(folder)
    assert (found.config["optimizer"]["momentum"], found.config["framework"], found.config["np"]) == (0.9, "pytorch", 2)
    assert found.summary["val_accuracy"] == result.val_accuracy
    assert found.summary["images_per_second"] == result.images_per_second
    assert found.summary["peak_rss_mib"] == result.peak_rss_mib
    assert {"result.json", "recipe.yaml"} <= found.files
    (local,) = folder.glob("tracking/wandb/offline-run-*/files/recipe.yaml")  # which `wandb sync` uploads
    assert schema.load(local) == schema.load(folder / "config.yaml")
    assert found.exits == [0]


@pytest.mark.check
def test_mlflow_gets_settings_metrics_summary_and_files(folder: Path, tmp_path: Path) -> None:
    logged(folder, "mlflow", until=4)
    (found, points), result = run_of(tmp_path), read_result(folder / "result.json")
    assert points == by_tag(folder)
    assert (found.info.status, found.info.run_name) == ("FINISHED", "run")
    assert (found.data.params["optimizer.momentum"], found.data.params["framework"]) == ("0.9", "pytorch")
    assert found.data.metrics["val_accuracy"] == result.val_accuracy
    assert found.data.metrics["peak_rss_mib"] == result.peak_rss_mib
    store, identity = mlflow.MlflowClient(), found.info.run_id
    assert {each.path for each in store.list_artifacts(identity)} == {"result.json", "recipe.yaml"}
    local = Path(store.download_artifacts(identity, "recipe.yaml"))
    assert schema.load(local) == schema.load(folder / "config.yaml")


def test_an_mlflow_run_that_goes_on_is_one_run(folder: Path, tmp_path: Path) -> None:
    logged(folder, "mlflow", until=3, error=RunError("a rank failed"))
    assert run_of(tmp_path)[0].info.status == "FAILED"
    logged(folder, "mlflow", until=5, error=KeyboardInterrupt())  # rank 0 writes the first lines again
    found, points = run_of(tmp_path)
    assert found.info.status == "KILLED" and len(points["train/loss"]) < len(by_tag(folder)["train/loss"])
    logged(folder, "mlflow", until=9)
    found, points = run_of(tmp_path)
    assert (found.info.status, points) == ("FINISHED", by_tag(folder))


def test_a_tracker_that_fails_in_the_middle_is_one_warning(folder: Path, tmp_path: Path) -> None:
    said: list[str] = []
    with Trackers(["mlflow"], said.append) as opened:
        opened.begin(begun(folder))
        (place,) = (tmp_path / "mlruns").glob("*/*/metrics")
        shutil.rmtree(place)
        place.write_text("no folder")  # the disk is gone, as far as MLflow can see
        for line in read_metrics(folder / "metrics.jsonl"):
            opened.log(line)
        assert len(said) == 2
        place.unlink()
        place.mkdir()
    assert len(said) == 2 and "metrics cannot be logged" in said[1] and "training continues" in said[1], said
    assert run_of(tmp_path)[1] == by_tag(folder), "the end of the run has brought them"


def test_the_process_of_wandb_is_killed(folder: Path) -> None:
    said: list[str] = []
    with Trackers(["wandb"], said.append) as opened:
        opened.begin(begun(folder))
        for process in psutil.Process().children():
            if "wandb-core" in process.name():
                process.kill()
                process.wait()
        for line in read_metrics(folder / "metrics.jsonl"):
            opened.log(line)
    assert 2 <= len(said) <= 3 and all(line.startswith("wandb: ") for line in said), said
    assert all("\n" not in line for line in said)


class Answers(BaseHTTPRequestHandler):
    """A tracking server that answers each request with its status and bytes."""

    status, body = 200, b""

    def do_GET(self) -> None:
        self.send_response(self.status)
        self.send_header("Content-Length", str(len(self.body)))
        self.end_headers()
        self.wfile.write(self.body)

    do_POST = do_GET

    def log_message(self, *_: object) -> None: ...


@pytest.mark.parametrize(("status", "body"), [(500, b"no"), (200, b"\x00\xff\x1b[2J<html>")])
def test_a_server_that_refuses_or_answers_garbage_is_a_line(
    status: int, body: bytes, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = type("These", (Answers,), {"status": status, "body": body})
    with ThreadingHTTPServer(("127.0.0.1", 0), answers) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{server.server_address[1]}")
        with pytest.raises(RequestError, match=r"^--log mlflow: no run can be opened: [^\n]*$"):
            logged(folder, "mlflow", until=1)
        server.shutdown()


def test_a_tracker_that_cannot_be_opened_is_refused_without_its_password(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://me:{SECRET}@127.0.0.1:9")
    with pytest.raises(RequestError, match=r"^--log mlflow: no run can be opened: .*127\.0\.0\.1") as raised:
        logged(folder, "mlflow", until=1)
    assert SECRET not in str(raised.value) and "\n" not in str(raised.value)
    assert not (folder / "tracking").exists(), "nothing is left of it"


def test_what_one_tracker_refuses_the_others_do_not_announce(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_ALLOW_FILE_STORE")
    said: list[str] = []
    remedy = r"^--log mlflow: no run can be opened: .*; set MLFLOW_ALLOW_FILE_STORE=true, or MLFLOW_TRACKING_URI="
    with pytest.raises(RequestError, match=remedy), Trackers(["wandb", "mlflow"], said.append) as opened:
        opened.begin(begun(folder))
    assert said == [] and not (folder / "tracking").exists()


@pytest.mark.check
def test_no_credentials_are_in_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "hunter22")
    error = Exception(f"https://me:pass@host/x\nrefused {SECRET} and hunter22")
    assert trackers.reason(error) == "https://…@host/x refused … and …"


@pytest.mark.check
def test_a_missing_library_is_named_with_its_command(
    inside: Hvdkit, recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "wandb").mkdir()  # what W&B leaves in a folder is not the library
    elsewhere = [str(tmp_path)]
    monkeypatch.setattr(trackers, "find_spec", lambda name: PathFinder.find_spec(name, elsewhere))
    done = inside("train", recipe, "--log", "wandb", "--log", "mlflow", "--log", "mlflw", "--out", "run")
    assert done.returncode == 2 and not (tmp_path / "run").exists()
    pip = f"{sys.executable} -m pip install"
    assert done.stderr.splitlines() == [
        f"--log wandb: wandb is not installed beside hvdkit; run `{pip} 'hvdkit[wandb]'`",
        f"--log mlflow: mlflow is not installed beside hvdkit; run `{pip} 'hvdkit[mlflow]'`",
        "--log mlflw: expected one of wandb, mlflow, tensorboard; did you mean 'mlflow'?",
    ]


def test_a_comparison_logs_its_runs_when_all_have_ended(real: Path, tmp_path: Path) -> None:
    plans = [make_plan(schema.load(RUN / "config.yaml"), "pytorch", Placement(np)) for np in (1, 2)]
    said: list[str] = []
    run_order.log(run_order.RunOrder(plans, 1, 1), real, ["mlflow"], said.append)
    store = mlflow.MlflowClient()
    found = store.search_runs([store.get_experiment_by_name("hvdkit").experiment_id])
    assert {run.info.run_name for run in found} == {"pytorch-np1", "pytorch-np2"} and len(said) == 2, said
    assert said[1] == "mlflow: 2 runs in the group comparison"
    for run in found:
        assert (run.info.status, run.data.tags["group"]) == ("FINISHED", real.name)
        assert run.data.params["np"] == run.info.run_name[-1]
        result = read_result(real / "runs" / run.info.run_name / "result.json")
        assert run.data.metrics["images_per_second"] == result.images_per_second


SETTINGS = ("epochs=1", "log_every=3", "batch_size=64", "checkpoint={every_steps: 2}", "threads=1")


@pytest.mark.usefixtures("warm")
@pytest.mark.timeout(300)
def test_a_real_run_is_interrupted_and_goes_on_in_the_same_runs(hvdkit: Hvdkit, recipe: Path, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    gate.write_text("hold 5")  # of 11 updates
    options = ("--framework", "mxnet", "-np", 2, "--log", "wandb", "--log", "mlflow", "--log", "tensorboard")
    settings = (*SETTINGS, *paced.overrides(gate))
    with under_way(tmp_path / "run", recipe, *options, *settings) as process:
        assert wait_until(lambda: (tmp_path / "run" / "metrics.jsonl").read_text(), 60)
        process.send_signal(signal.SIGINT)
        said = process.communicate(timeout=hygiene.patience(60))[1]
    assert process.returncode == 130 and "interrupted" in said, said
    assert run_of(tmp_path)[0].info.status == "KILLED"
    gate.unlink()
    done = hvdkit("train", recipe, *options, "--out", "run", "--resume", *settings)
    assert done.returncode == 0 and SECRET not in done.stdout + done.stderr, done.stderr
    (found, points), files = run_of(tmp_path), Offline(tmp_path / "run")
    assert (found.info.status, files.exits, len(files.ids)) == ("FINISHED", [255, 0], 1)
    wanted = by_tag(tmp_path / "run")
    assert points == files.points and points.keys() == wanted.keys()
    for speed in ("train/images_per_second", "train/communication_mbit_per_s"):
        assert [step for step, _ in points.pop(speed)] == [step for step, _ in wanted.pop(speed)] == [3, 6, 9]
    assert points == wanted, "a step that was made again has the same loss, but another speed"
    assert list((tmp_path / "run" / "tensorboard").iterdir())
    done = hvdkit("train", recipe, "--framework", "mxnet", "--out", "run", "--overwrite", "steps=1")
    assert done.returncode == 0 and not (tmp_path / "run" / "tracking").exists(), done.stderr
