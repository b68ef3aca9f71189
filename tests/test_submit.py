"""`hvdkit submit`: what it writes, and what it refuses. The scheduler itself is in test_slurm.py."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import hvdkit
from hvdkit.commands import submit
from hvdkit.commands.submit_request import SubmitRequest
from hvdkit.launch.submission import templating
from hvdkit.recipe import schema
from tests.conftest import ROOT
from tests.inside import call

pytestmark = pytest.mark.check

RECIPE = "resnet20-digits"
REQUEST = SubmitRequest(recipe=Path(RECIPE), np=2)


def test_a_script_that_a_person_can_read(tmp_path: Path) -> None:
    asked = [
        "epochs=2",
        "--framework",
        "keras",
        "-np",
        "8",
        "--nodes",
        "2",
        "--gpus-per-node",
        "4",
        "--time",
        "1-00:00:00",
    ]
    asked += ["--partition", "gpu,fast", "--account", "lab", "--constraint", "a100|h100"]
    asked += ["--cpus-per-task", "8"]
    done = call(tmp_path, "submit", RECIPE, *asked, "--line=--mail-type=END", "--out", "runs/my run")
    assert done.returncode == 0, done.stderr
    script = tmp_path / "runs" / "my run.sbatch"
    lines = script.read_text().splitlines()
    assert lines[0] == "#!/bin/bash"
    assert [line.removeprefix("#SBATCH ") for line in lines if line.startswith("#SBATCH")] == [
        "--job-name=resnet20-digits", "--nodes=2", "--ntasks=8", "--ntasks-per-node=4", "--cpus-per-task=8",
        "--gpus-per-node=4", "--time=1-00:00:00", "--partition=gpu,fast", "--account=lab", "--constraint=a100|h100",
        f'--output="{tmp_path}/runs/my run-%j.log"', "--open-mode=append", "--requeue", "--signal=B:USR2@120",
        "--mail-type=END",
    ]  # fmt: skip
    [command] = [shlex.split(line) for line in lines if line.endswith(" &")]
    assert command[1:] == [
        "-m", "hvdkit", "train", f"{tmp_path}/runs/my run.yaml", "--framework", "keras", "-np", "8", "--launcher",
        "slurm", "--out", f"{tmp_path}/runs/my run", "--resume", "&",
    ]  # fmt: skip
    assert schema.load(tmp_path / "runs" / "my run.yaml").epochs == 2, "the resolved recipe travels with the job"
    assert subprocess.run(["bash", "-n", script], check=False).returncode == 0
    assert shlex.split(done.stdout.splitlines()[-1].partition(": ")[2]) == ["sbatch", str(script)]
    again = call(tmp_path, "submit", RECIPE, "--out", "runs/my run")
    assert (again.returncode, again.stderr.count("exists; give --overwrite")) == (2, 2)


def test_an_array_has_a_recipe_and_a_folder_for_each_task(tmp_path: Path) -> None:
    asked = ["--array", "seed=1,2", "--array", "optimizer.learning_rate=0.1,0.2", "--out", "runs/my grid"]
    done = call(tmp_path, "submit", RECIPE, "epochs=2", *asked, "-np", "2")
    assert done.returncode == 0, done.stderr
    script = tmp_path / "runs" / "my grid.sbatch"
    text = script.read_text()
    assert "\n#SBATCH --array=0-3\n#SBATCH --nodes=1\n" in text
    assert f'\n#SBATCH --output="{tmp_path}/runs/my grid-%A_%a.log"\n' in text
    assert '\n    scontrol requeue "$SLURM_ARRAY_JOB_ID"_"$SLURM_ARRAY_TASK_ID"\n' in text
    assert "\n# Task 2: seed=2 optimizer.learning_rate=0.1\n" in text
    recipes = [schema.load(tmp_path / "runs" / f"my grid-{task}.yaml") for task in range(4)]
    assert [(each.seed, each.optimizer.learning_rate, each.epochs) for each in recipes] == [
        (1, 0.1, 2), (1, 0.2, 2), (2, 0.1, 2), (2, 0.2, 2),
    ]  # fmt: skip
    [command] = [line.removesuffix(" &") for line in text.splitlines() if line.endswith(" &")]
    shell, environment = ["bash", "-c", f"printf '%s\\n' {command}"], {"SLURM_ARRAY_TASK_ID": "2"}
    shown = subprocess.check_output(shell, env=environment, text=True).splitlines()
    assert f"{tmp_path}/runs/my grid-2.yaml" in shown and f"{tmp_path}/runs/my grid/2" in shown
    assert f"finished='{tmp_path}/runs/my grid/'\"$SLURM_ARRAY_TASK_ID\"/result.json\n" in text


def test_the_function_writes_what_the_command_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    call(tmp_path, "submit", RECIPE, "-np", "4", "--nodes", "2", "--line=--mail-type=END", "--out", "one/run")
    monkeypatch.chdir(tmp_path)
    resources = {"nodes": 2, "lines": ["--mail-type=END"]}
    done = hvdkit.submit(RECIPE, np=4, resources=resources, out="other/run")
    assert done.job is None and done.file == tmp_path / "other" / "run.sbatch"
    assert done.file.read_text().replace("/other/", "/one/") == (tmp_path / "one" / "run.sbatch").read_text()
    for wrong, said in (
        ({"pods": 2}, "resources: pods: expected some of account, constraint"),
        ({"nodes": "two"}, "nodes: expected a whole number, got 'two'"),
    ):
        with pytest.raises(hvdkit.RequestError, match=said):
            hvdkit.submit(RECIPE, resources=wrong)
    pods = {"image": "registry/hvdkit", "results": "claim", "name": "mine"}
    found = hvdkit.submit(RECIPE, to="kubernetes", resources=pods, script="mine.yaml").lines[-1]
    assert found == f"start it with: kubectl create -f {tmp_path / 'mine.yaml'}"


def job(folder: Path, *asked: str) -> tuple[list[str], str]:
    """The words after `hvdkit` of the job that is written, and its script."""
    done = call(folder, "submit", "--out", "runs/mine", *asked)
    assert done.returncode == 0, done.stderr
    text = (folder / "runs" / "mine.sbatch").read_text()
    [command] = [shlex.split(line)[3:-1] for line in text.splitlines() if line.endswith(" &")]
    assert subprocess.run(["bash", "-n", folder / "runs" / "mine.sbatch"], check=False).returncode == 0
    return command, text


@pytest.mark.parametrize(("script", "said"), [("train.py", "train.py: is not copied; "), ("/code/train.py", "")])
def test_pods_have_a_script_of_their_own(script: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import horovod.torch\n")
    pods = ["--image", "registry/hvdkit", "--results", "claim", "--volume", "code:/code", "--script", "job.yaml"]
    done = call(
        tmp_path, "submit", "--to", "kubernetes", "--framework", "pytorch", *pods, "--", script, "--epochs", "3"
    )
    assert done.returncode == 0 and f'- "{script}"' in (tmp_path / "job.yaml").read_text()
    assert said in done.stderr and ("not copied" in done.stderr) == bool(said)


def test_any_command_is_a_job(tmp_path: Path) -> None:
    """A comparison chooses its ranks by the hosts, and continues; the other commands get the job's ranks."""
    recipe = str(ROOT / "recipes" / f"{RECIPE}.yaml")
    out = ["--out", str(tmp_path / "runs" / "mine")]
    slots = ["-np", "8", "--nodes", "2"]
    command, text = job(tmp_path, *slots, "--", "compare", RECIPE, "--rounds", "3", "steps=20")
    assert command == ["compare", *out, "--resume", recipe, "--rounds", "3", "steps=20"]
    assert "\n#SBATCH --ntasks=8\n" in text and "scontrol requeue" in text and "mine/compare.json" in text
    (tmp_path / "runs" / "mine.sbatch").unlink()
    command, text = job(tmp_path, *slots, "--framework", "keras", "--", "bench", "allreduce", "--seconds", "1")
    assert command == ["bench", "--framework", "keras", *out, "-np", "8", "--overwrite", "allreduce", "--seconds", "1"]
    assert "scontrol requeue" not in text, "it cannot continue"


@pytest.mark.parametrize("module", ["horovod.torch", "horovod.tensorflow.keras"])
def test_a_script_is_a_job_of_hvdkit_launch(module: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(f"import {module} as hvd\n")
    command, text = job(tmp_path, "-np", "4", "--requeue", "--", "mine.py", "--lr", "0.1")
    out = str(tmp_path / "runs" / "mine")
    assert command == ["launch", "--out", out, "-np", "4", "--overwrite", str(tmp_path / "mine.py"), "--lr", "0.1"]
    assert "scontrol requeue" in text and '[ "$warned" ] && [ $status -eq 143 ]' in text and "finished=" not in text


def test_a_job_of_ray_starts_where_it_was_submitted(tmp_path: Path) -> None:
    """Training, which continues; a script of one's own; a comparison of the job's ranks. Its words are one line."""
    (tmp_path / "my folder").mkdir()
    (tmp_path / "my folder" / "mine.py").write_text("import horovod.torch as hvd\n")
    elastic, asked = "elastic={min_np: 2, max_np: 8}", ["submit", "--to", "ray", "-np", "4", "--name", "mine"]
    for words, starts, ends in (
        ([RECIPE, elastic], ["train", "0.yaml", "--framework", "pytorch"], ["--out", "0", "--resume"]),
        (["--", "mine.py", "a b"], ["launch", "--out", "1"], ["--overwrite", "mine.py", "a b"]),
        (["--", "compare", RECIPE], ["compare", "--out", "2"], ["--resume", str(ROOT / "recipes" / f"{RECIPE}.yaml")]),
    ):
        run = tmp_path / "my folder" / starts[starts.index("--out") + 1 if "--out" in starts else 1][0]
        done = call(tmp_path / "my folder", *asked, "--out", run.name, *words)
        assert done.returncode == 0, done.stderr
        script = run.with_suffix(".sh")
        changes, command = script.read_text().splitlines()[-2:]
        assert shlex.split(changes) == ["cd", str(run.parent), "||", "exit"]
        found = [word.removeprefix(f"{run.parent}/") for word in shlex.split(command)[4:]]
        assert found[: len(starts)] == starts and found[-len(ends) :] == ends, found
        assert "-np 4 --launcher ray" in " ".join(found)
        assert subprocess.run(["bash", "-n", script], check=False).returncode == 0
        assert shlex.split(done.stdout.splitlines()[-1])[-3:] == ["--", "bash", str(script)]


def test_the_framework_is_that_of_the_recipes_script(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text("import hvdkit\nhvdkit.run_task('keras', object)\n")
    recipe = "name: mine\nmodel: {name: own, script: net.py}\ndata: {name: digits}\n"
    (tmp_path / "mine.yaml").write_text(f"{recipe}optimizer: {{name: sgd, learning_rate: 0.1}}\n")
    command, _ = job(tmp_path, "mine.yaml")
    assert command[command.index("--framework") + 1] == "keras"
    wrong = call(tmp_path, "submit", "mine.yaml", "--framework", "mxnet", "--out", "other")
    assert wrong.returncode == 2 and "it trains with keras, got --framework mxnet" in wrong.stderr


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["compare", RECIPE, "--roundz", "3"], "--roundz"),
        (["compare", "no-such-recipe"], "no-such-recipe"),
        (["compare", RECIPE, "--out", "x"], "submit's --out names the folder"),
        (["compare", "--rounds", "3", RECIPE], "expected what it is about first"),
        (["doctor", "x"], "doctor: expected a command that starts ranks"),
        (["none.py"], "none.py: no such file"),
        (["sh", "-c", "a b"], "sh: a program; give -- launch --runtime NAME -- sh -c 'a b'"),
        (["plain.py"], "no import of Horovod is seen in it; give --framework"),
    ],
)
def test_a_command_that_would_fail_once_it_has_queued_is_refused(words: list[str], told: str, tmp_path: Path) -> None:
    (tmp_path / "plain.py").write_text("import json\n")
    done = call(tmp_path, "submit", "--", *words)
    assert done.returncode == 2 and told in done.stderr and "Traceback" not in done.stderr, done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["plain.py"]


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        (["mine.py", "--epochs", "3"], "--epochs: no option of `hvdkit submit`; those of mine.py follow it after `--"),
        (["--array", "seed"], "--array seed: expected KEY=VALUE"),
        (["--array", "sed=1,2"], "sed"),
        (["--array", "seed="], "--array seed: expected a list of values, got []"),
        (["--array", "seed=1,2", "seed=3"], "seed=3: --array gives this key's values"),
        (["--array", "seed=1,1"], "--array: expected each value of a key once"),
        (["--array", "seed=1,2", "--out", "/dev/null"], "--out /dev/null: no folder; expected a folder"),
        (["--line=--array=0-9"], "for arrays --array KEY=VALUE"),
        (["--array", "seed=1,2", "--to", "kubernetes"], "--array: an option for --to slurm"),
        (["--array", "seed=1,2,...,2000"], "--array: expected at most 1,000 tasks, got 2,000"),
        (["--to", "pbs"], "--to pbs: expected slurm"),
        (["--to", "ray", "--nodes", "2"], "--nodes: an option for --to slurm and kubernetes, and this job is for ray"),
        (["--to", "ray", "--name", "My_job"], "--name 'My_job': expected lower-case letters, digits and '-'"),
        (["--to", "ray", "elastic={max_np: 2}", "-np", "4"], "-np 4: expected 1 to 2, as elastic says"),
        (["--framework", "torch"], "unknown framework 'torch'"),
        (["-np", "3", "--nodes", "2"], "-np 3: expected a multiple of --nodes 2"),
        (["-np", "0"], "-np 0: expected at least 1"),
        (["--nodes", "0"], "--nodes 0: expected at least 1"),
        (["--time", "soon"], "--time 'soon': expected minutes, HH:MM:SS"),
        (["--partition", "a b"], "--partition 'a b': expected a name"),
        (["--partition", "x\n#SBATCH --uid=0"], "--partition 'x"),
        (["--account", "$(id)"], "--account '$(id)': expected a name"),
        (["--constraint", "a;b"], "--constraint 'a;b': expected features"),
        (["--out", "a\nb"], "/a\\nb': expected no control characters"),
        (["--script", "a\\b.sbatch"], "a\\b.sbatch: expected no backslash in it"),
        (["--line", "rm -rf /"], "--line 'rm -rf /': expected an option of sbatch"),
        (["--line", "--mail-type=END\nrm"], "--line '--mail-type=END"),
        (["checkpoint=null"], "checkpoint: expected one"),
        (["--script", "job.yaml"], "--script"),
        (["--out", "job.sbatch"], "the script or manifest is --script job.sbatch"),
        (["--rival", "ddp", "--framework", "mxnet"], "ddp"),
        (["epochs=-1"], "epochs"),
        (["--script", "/proc/job.sbatch"], "/proc"),
    ],
)
def test_wrong_requests_leave_nothing(asked: list[str], told: str, tmp_path: Path) -> None:
    done = call(tmp_path, "submit", RECIPE, *asked)
    assert done.returncode == 2 and told in done.stderr and "Traceback" not in done.stderr, done.stderr
    assert not list(tmp_path.iterdir())


def test_without_sbatch_nothing_is_left(tmp_path: Path) -> None:
    done = call(tmp_path, "submit", RECIPE, "--script", "job.sbatch", "--apply", PATH=str(tmp_path))
    assert (done.returncode, done.stderr.startswith("--apply: sbatch cannot be run")) == (2, True), done.stderr
    assert "leave out --apply" in done.stderr and "job.sbatch" not in done.stderr, "no file that is not there"
    assert not list(tmp_path.iterdir())


def word(line: str) -> str:
    """The first word of what follows #SBATCH, as sbatch reads it (src/sbatch/opt.c, _get_argument)."""
    found, quote, escaped = "", "", False
    for sign in line:
        if escaped:
            found, escaped = found + sign, False
        elif sign == "\\":
            escaped = True
        elif quote:
            found, quote = (found, "") if sign == quote else (found + sign, quote)
        elif sign in "\"'":
            quote = sign
        elif sign in " \t\n\v\f\r#":
            break
        else:
            found += sign
    assert not quote, "sbatch: Unmatched quote"
    return found


def filled(pattern: str, numbers: dict[str, str]) -> str:
    """The name of a file that Slurm makes of a pattern (slurmstepd/fname.c)."""
    assert "\\" not in pattern, "Slurm would fill in nothing"
    return re.sub("%(.)", lambda match: "%" if match[1] == "%" else numbers[match[1]], pattern)


PATHS = st.text(st.characters(exclude_categories=("Cc", "Cs"), exclude_characters="\\/"), min_size=1, max_size=20)


@given(PATHS, st.booleans())
def test_the_log_is_where_the_path_says(folder: str, array: bool) -> None:
    """Spaces, %, quotes, #, $ and any letters, for a job and for a task of an array."""
    log = Path("/runs") / folder / f"job-{submit.NUMBERS}.log"
    text = submit.script(REQUEST, "name", ["true"], "/run/result.json", log, ["a", "b"] if array else ())
    [line] = [line for line in text.split("\n") if "--output=" in line]
    numbers = {"A": "7", "a": "1"} if array else {"j": "7"}
    expected = f"/runs/{folder}/job-{'7_1' if array else '7'}.log"
    assert filled(word(line.removeprefix("#SBATCH ")), numbers) == f"--output={Path(expected)}"


def test_a_template_of_the_users_own(tmp_path: Path) -> None:
    """It is a copy of hvdkit's own, or includes it; whatever is in a path stays one word."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "slurm.sbatch.j2").write_text("{{ array | length }} {{ command | map('word') | join(' ') }}\n")
    copy = tmp_path / "copy.j2"
    copy.write_text(f"{(templating.FOLDER / 'slurm.sbatch.j2').read_text()}# the end\n")
    asked = ["submit", RECIPE, "--out", "a; b", "--overwrite", "--template"]
    plain = call(tmp_path, *asked[:-1])
    assert plain.returncode == 0, plain.stderr
    script = tmp_path / "a; b.sbatch"
    expected = f"{script.read_text()}# the end\n"
    for template, text in ((copy, expected), ("mine/slurm.sbatch.j2", f"0 {command(expected)}\n")):
        done = call(tmp_path, *asked, template)
        assert (done.returncode, script.read_text()) == (0, text), done.stderr


def command(text: str) -> str:
    """The command that a script runs."""
    [line] = [line.removesuffix(" &") for line in text.splitlines() if line.endswith(" &")]
    return line


@pytest.mark.parametrize(
    ("template", "to", "told"),
    [
        (None, "slurm", "own.j2: no such file; copy one of those in "),
        ("a\n{% if x %}", "slurm", "own.j2: line 2: "),
        ("{{ nodez }}", "slurm", "'nodez' is undefined; a template has account, "),
        ("{{ nodes / 0 }}", "slurm", "division by zero"),
        ("{% include 'no.j2' %}", "slurm", "no.j2: no such file"),
        ("{{ ''.__class__.__mro__ }}", "slurm", "is unsafe"),
        ("{{ name }}: {", "kubernetes", "own.j2: "),
        ("", "kubernetes", "own.j2: "),
    ],
)
def test_a_template_with_a_fault_leaves_nothing(template: str | None, to: str, told: str, tmp_path: Path) -> None:
    if template is not None:
        (tmp_path / "own.j2").write_text(template)
    there = list(tmp_path.iterdir())
    more = ["--image", "hvdkit", "--results", "runs"] if to == "kubernetes" else []
    done = call(tmp_path, "submit", RECIPE, "--to", to, *more, "--template", "own.j2")
    assert (done.returncode, done.stderr.startswith("--template "), told in done.stderr) == (2, True, True), done.stderr
    assert done.stderr.count("\n") == 1 and list(tmp_path.iterdir()) == there


def test_what_a_job_reads_is_said_and_has_whole_paths(tmp_path: Path) -> None:
    """A job may be handed over in another folder, and runs on nodes that see only what is shared."""
    (tmp_path / "nets").mkdir()
    (tmp_path / "nets" / "net.py").write_text("import helper, numpy\nfrom layers.norm import Norm\nimport hvdkit\n")
    (tmp_path / "nets" / "helper.py").write_text("import deeper\n")
    (tmp_path / "nets" / "deeper.py").write_text("")
    (tmp_path / "nets" / "unused.py").write_text("")
    (tmp_path / "nets" / "layers").mkdir()
    (tmp_path / "nets" / "layers" / "norm.py").write_text("")
    asked = ["model={name: own, script: nets/net.py, options: {table: /etc/hosts, text: /no/file}}", "--out", "run"]
    done = call(tmp_path, "submit", RECIPE, *asked, "data={name: native, module: pipe.py}", "schedule.scale=none")
    assert done.returncode == 0, done.stderr
    [line] = [line for line in done.stdout.splitlines() if line.startswith("all nodes must see: ")]
    place, pipe = tmp_path / "nets" / "net.py", tmp_path / "pipe.py"
    assert f"model.script {place} with " in line and f"data.module {pipe}" in line, line
    assert {"helper.py", "deeper.py", "layers"} == set(line.partition(" with ")[2].partition(" beside")[0].split(", "))
    assert "model.options.table /etc/hosts" in line and "/no/file" not in line
    recipe = schema.load(tmp_path / "run.yaml")
    assert (recipe.model.script, recipe.data.module) == (str(place), str(pipe))
    plain = call(tmp_path, "submit", RECIPE, "--out", "plain")
    assert plain.returncode == 0 and len(plain.stdout.splitlines()) == 2, plain.stdout


@given(st.lists(st.text(max_size=20), min_size=1, max_size=3), st.text(min_size=1, max_size=20))
def test_nothing_reaches_the_shell_unquoted(words: list[str], folder: str) -> None:
    """Every word of the command, and the run's folder, is one word of the script again."""
    words = [word.replace("\0", "") for word in words]
    run = Path("/") / re.sub(r"[\0\n/]", "", folder)
    text = submit.script(REQUEST, "name", ["echo", *words, templating.TASK], str(run / "result.json"), Path("/log"))
    command = text[text.index("\necho") + 1 : text.rindex(" &\ntraining=$!")]
    assert shlex.split(command) == ["echo", *words, "$SLURM_ARRAY_TASK_ID"]
    finished = text[text.rindex("\nfinished=") + 1 : text.rindex('\nif [ "$warned"')]
    assert shlex.split(finished) == [f"finished={run / 'result.json'}"]
