"""Attacks on commands other than train: interrupted, a rank or a folder lost, damaged inputs."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from tests.trials.trial import HVDKIT, ROOT, Running, attack, declare, expect, ran, running

MXNET = ("--framework", "mxnet", "-np", "2")
SMALL = ("resnet20-digits", "model.name=resnet8", "epochs=1", "threads=1", "tune=none")
# Commands that start ranks, and how many results.json they would leave.
RANKS = {
    "bench": ("bench", "allreduce", *MXNET),
    "compare": ("compare", *SMALL, "--framework", "mxnet", "--framework", "pytorch", "-np", "2"),
    "parity": ("parity", *SMALL, "--framework", "mxnet", "--steps", "200"),
    "profile": ("profile", *SMALL, *MXNET),
    "tune": ("train", *SMALL, *MXNET, "tune=measure"),
}


def _started(job: Running) -> None:
    """Wait until ranks run."""
    job.until(lambda: _workers(job) or job.process.poll() is not None, 120, "a rank")
    expect(job.process.poll() is None, job.text())


def _workers(job: Running) -> list[int]:
    """Processes of ranks, of recipes or of hvdkit's own."""
    found = []
    for pid in job.pids():
        try:
            environ = Path(f"/proc/{pid}/environ").read_bytes()
            words = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            continue
        if b"\0HOROVOD_RANK=" in environ and b"/agent/" not in words:
            found.append(pid)
    return found


def _no_half(job: Running) -> None:
    """What JSON there is can be read, and no temporary file is left."""
    for path in job.folder.rglob("*.json") if job.folder.exists() else ():
        try:
            json.loads(path.read_text())
        except ValueError:
            expect(False, f"{path} is no JSON")
    left = [str(path) for path in job.folder.rglob("*") if ".tmp" in path.name] if job.folder.exists() else []
    expect(not left, f"left behind: {left}")


def _interrupted(folder: Path, words: tuple[str, ...], number: int) -> str:
    with running(*words, out=folder / "out") as job:
        _started(job)
        time.sleep(1)
        job.process.send_signal(number)
        status = job.ended(40)
        job.sound()
        job.nothing_left()
        _no_half(job)
    expect(status in ((130, -2) if number == signal.SIGINT else (143, -15, 0, 1)), f"status {status}\n{job.text()}")
    expect(status != 0 or "SIGTERM" in job.text(), job.text())
    return job.last()


def _rank_killed(folder: Path, words: tuple[str, ...]) -> str:
    with running(*words, out=folder / "out") as job:
        _started(job)
        time.sleep(1)
        workers = _workers(job)
        expect(workers, f"no rank runs\n{job.text()}")
        os.kill(workers[-1], signal.SIGKILL)
        status = job.ended(170)
        job.sound()
        job.nothing_left()
        _no_half(job)
    expect(status == 1 and "SIGKILL" in job.text(), f"status {status}\n{job.text()}")
    return job.line("SIGKILL")


def _folder_removed(folder: Path, words: tuple[str, ...]) -> str:
    with running(*words, out=folder / "out") as job:
        _started(job)
        time.sleep(1)
        shutil.rmtree(job.folder, ignore_errors=True)
        status = job.ended(170)
        job.sound()
        job.nothing_left()
    expect(status != 0 or any(job.folder.rglob("*.json")), f"status 0 without results\n{job.text()}")
    return job.last()


WAYS: dict[str, tuple[str, str, Callable[..., str], tuple[int, ...]]] = {
    "interrupted": (
        "SIGINT one second after a rank runs", "status 130 or by the signal; no process, no half file is left",
        _interrupted, (signal.SIGINT,),
    ),
    "terminated": (
        "SIGTERM one second after a rank runs", "ends within 40 s; no silent success; no process, no half file is left",
        _interrupted, (signal.SIGTERM,),
    ),
    "rank_killed": (
        "kill -9 of a rank", "status 1 and a line with SIGKILL; no process, no half file is left", _rank_killed, (),
    ),
    "folder_removed": (
        "--out is removed while ranks run", "a line with what is missing; status 0 only with results; no traceback",
        _folder_removed, (),
    ),
}  # fmt: skip
for _name, _words in RANKS.items():
    for _how, (_does, _expected, _function, _more) in WAYS.items():
        does = f"hvdkit {' '.join(_words)}: {_does}."
        declare(f"commands.{_name}_{_how}", does, _expected, _function, _words, *_more)


def _trained(folder: Path) -> Path:
    job = ran("train", *SMALL, *MXNET, "steps=10", out=folder / "run")
    expect(job.process.returncode == 0, job.text())
    return job.folder


def _called(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*HVDKIT, *words], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
        timeout=120, stdin=subprocess.DEVNULL, errors="replace",
    )  # fmt: skip


def _cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def _flipped(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def _huge_header(path: Path) -> None:
    path.write_bytes((2**62).to_bytes(8, "little") + path.read_bytes()[8:])


def _pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _looped(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.name)


def _deep(path: Path) -> None:
    path.write_text("[" * 100_000)


def _coloured(path: Path) -> None:
    path.write_text(path.read_text().replace("resnet8", "\\u001b]0;pwned\\u0007\\u001b[2J", 1))


DAMAGE: dict[str, tuple[str, Callable[[Path], object]]] = {
    "cut": ("model.safetensors", _cut),
    "one flipped bit": ("model.safetensors", _flipped),
    "a header of 2^62 bytes": ("model.safetensors", _huge_header),
    "a pipe": ("model.safetensors", _pipe),
    "a link to itself": ("model.safetensors", _looped),
    "cut JSON": ("checkpoint.json", _cut),
    "100,000 brackets": ("checkpoint.json", _deep),
    "a pipe for JSON": ("checkpoint.json", _pipe),
    "escape sequences": ("checkpoint.json", _coloured),
}


def _damaged(folder: Path, *words: str) -> str:
    run, wrong = _trained(folder), []
    last = (run / "checkpoints" / "last").resolve()
    for name, (file, damage) in DAMAGE.items():
        copy = folder / "damaged"
        shutil.copytree(last, copy)
        damage(copy / file)
        try:
            done = _called(
                *(word.replace("CHECKPOINT", str(copy)).replace("OUT", str(folder / "made")) for word in words)
            )
            text = done.stdout + done.stderr
            if done.returncode != 2 or "Traceback" in text or "\x1b" in text or len(done.stderr.splitlines()) > 3:
                wrong.append(f"{name}: status {done.returncode}: {text[-300:]!r}")
        except subprocess.TimeoutExpired:
            wrong.append(f"{name}: does not end")
        made = [path.name for path in folder.glob("made*")]
        if made:
            wrong.append(f"{name}: leaves {made}")
            for path in folder.glob("made*"):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        shutil.rmtree(copy)
    expect(not wrong, "; ".join(wrong))
    return f"{len(DAMAGE)} damaged checkpoints, each refused in one line"


@attack("each is refused with status 2 in a line that names the file; nothing is written")
def evaluate_damaged(folder: Path) -> str:
    """evaluate of nine checkpoints: cut, a flipped bit, a huge header, a pipe, a link to itself, bad JSON, escapes."""
    return _damaged(folder, "evaluate", "CHECKPOINT", "--framework", "mxnet", "--out", "OUT")


@attack("each is refused with status 2 in a line that names the file; nothing is written")
def export_damaged(folder: Path) -> str:
    """export of nine checkpoints: cut, a flipped bit, a huge header, a pipe, a link to itself, bad JSON, escapes."""
    return _damaged(folder, "export", "CHECKPOINT", "--out", "OUT.safetensors")


@attack("the file is absent or whole each time, and after the last export no other file stays beside it and resnet.py")
def export_killed(folder: Path) -> str:
    """kill -9 of export to .safetensors and .onnx, twelve times, 0.2 to 2.4 s after its start."""
    run, states = _trained(folder), []
    (folder / "to").mkdir()
    for number in range(12):
        name = folder / "to" / f"model.{'onnx' if number % 2 else 'safetensors'}"
        name.unlink(missing_ok=True)
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        with subprocess.Popen(
            [*HVDKIT, "export", str(run), "--out", str(name)],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        ) as process:
            time.sleep(0.2 * (number + 1))
            os.killpg(process.pid, signal.SIGKILL)
        states.append(name.stat().st_size if name.exists() else 0)
        (folder / "to" / name.name).unlink(missing_ok=True)
    for suffix in ("onnx", "safetensors"):
        done = _called("export", str(run), "--out", str(folder / "to" / f"model.{suffix}"))
        expect(done.returncode == 0, done.stderr)
        whole = (folder / "to" / f"model.{suffix}").stat().st_size
        halves = [
            size for number, size in enumerate(states) if size not in (0, whole) and number % 2 == (suffix == "onnx")
        ]
        expect(not halves, f"half files of {halves} bytes, whole: {whole}")
    left = sorted(path.name for path in (folder / "to").iterdir())
    expect(left == ["model.onnx", "model.safetensors", "resnet.py"], f"left: {left}")
    return f"sizes after each kill: {states}"


@attack("refused or shown with the text escaped; no script, no link of an image in the page, no raw control character")
def report_poisoned(folder: Path) -> str:
    """result.json and metrics.jsonl of a run hold HTML, scripts and escape sequences where texts are; then report."""
    run, wrong = _trained(folder), []
    evil = "<script>alert(1)</script><img src=x onerror=alert(2)>\x1b]0;pwned\x07"
    original = json.loads((run / "result.json").read_text())
    for key in [key for key, value in original.items() if isinstance(value, str)]:
        (run / "result.json").write_text(json.dumps({**original, key: evil}))
        done = _called("report", str(run))
        text = done.stdout + done.stderr
        page = (run / "report.html").read_text() if (run / "report.html").exists() else ""
        if "Traceback" in text or "\x1b" in text or done.returncode not in (0, 2):
            wrong.append(f"{key}: status {done.returncode} {text[-200:]!r}")
        if "<script>alert" in page or "<img src=x" in page:
            wrong.append(f"{key}: in the page as it is")
        for path in run.glob("report.*"):
            path.unlink()
    expect(not wrong, "; ".join(wrong))
    return f"{len([1 for value in original.values() if isinstance(value, str)])} keys"


@attack("refused in one line, status 2, no raw control character; nothing is written for the scheduler")
def submit_control_characters(folder: Path) -> str:
    """submit --to slurm and kubernetes with a newline and escape sequences in a path, a line, a name, an image."""
    evil, wrong = "a\n#SBATCH --wrap=x\ncommand: x\x1b[2J", []
    base = {"slurm": {}, "kubernetes": {"--image": "hvdkit:1", "--results": "claim"}}
    options = {
        "slurm": ("--run", "--out", "--line", "--partition", "--account", "--constraint", "--time", "--array"),
        "kubernetes": ("--out", "--image", "--results", "--name", "--namespace"),
    }
    for to, names in options.items():
        for name in names:
            value = {"--out": str(folder / evil), "--run": str(folder / evil), "--array": f"seed=1,{evil}"}.get(
                name, evil
            )
            given = {"--out": str(folder / "job"), **base[to], name: value}
            done = _called("submit", "resnet20-digits", "--to", to, *(f"{key}={text}" for key, text in given.items()))
            text = done.stdout + done.stderr
            left = [str(path) for path in folder.rglob("*")]
            if done.returncode != 2 or "Traceback" in text or "\x1b" in text or left:
                wrong.append(f"{to} {name}: status {done.returncode} {text[-150:]!r} {left}")
            for path in sorted(folder.rglob("*"), reverse=True):
                path.rmdir() if path.is_dir() else path.unlink()
    expect(not wrong, "; ".join(wrong))
    return f"{sum(len(names) for names in options.values())} refused"


@attack("bash reads the path as one word; the YAML parses, with the same path; nothing of it is executed")
def submit_hostile_names(folder: Path) -> str:
    """submit --to slurm and kubernetes for a run whose path has blanks, quotes, backticks, $( ) and a hash."""
    import yaml

    hostile = folder / 'it\'s "a" $(touch pwned) `touch pwned` #x'
    hostile.mkdir()
    submit = ("submit", "resnet20-digits", "-np", "2", "--to")
    done = _called(*submit, "slurm", "--run", str(hostile / "run"), "--out", str(hostile / "job.sbatch"))
    expect(done.returncode in (0, 2) and "Traceback" not in done.stderr, done.stderr)
    seen = [f"slurm: status {done.returncode} {done.stderr.strip()[:150]}"]
    if done.returncode == 0:
        script = hostile / "job.sbatch"
        fake = folder / "bin"
        fake.mkdir()
        for name in ("srun", "hvdkit", "scontrol", "python", "python3"):
            (fake / name).write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" >> {folder}/words\n')
            (fake / name).chmod(0o755)
        text = script.read_text()
        checked = subprocess.run(["bash", "-n", str(script)], capture_output=True, text=True)
        expect(checked.returncode == 0, checked.stderr + text)
        subprocess.run(
            ["bash", str(script)], env={"PATH": f"{fake}:/usr/bin:/bin"}, cwd=folder, timeout=60, capture_output=True
        )
        expect(not list(folder.rglob("pwned")), "executed")
    manifest = (*submit, "kubernetes", "--image", "hvdkit:1", "--results", "claim")
    done = _called(*manifest, "--out", str(hostile / "manifest.yaml"))
    seen.append(f"kubernetes: status {done.returncode} {done.stderr.strip()[:150]}")
    expect(done.returncode == 0 and "Traceback" not in done.stderr, done.stderr)
    expect(list(yaml.safe_load_all((hostile / "manifest.yaml").read_text())), "an empty manifest")
    return "; ".join(seen)
