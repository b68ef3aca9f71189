"""`hvdkit launch`: any program that uses Horovod, on all ranks, as horovodrun runs it."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated

from pydantic import Field

from hvdkit import paths, programs
from hvdkit.commands import fields, own_script
from hvdkit.commands.debug_logs import VARIABLES, collected
from hvdkit.commands.removed import Removals
from hvdkit.commands.request import Argument, Form, Option, say
from hvdkit.errors import Faults, RequestError, RunError
from hvdkit.launch.diagnosis.blame import LESS_MEMORY
from hvdkit.launch.diagnosis.exits import RankFailure
from hvdkit.launch.follow import followed
from hvdkit.launch.job import ElasticBounds, Job
from hvdkit.launch.launchers import LAUNCHERS
from hvdkit.launch.placement import Placement
from hvdkit.results.launch import CollectiveUse, Launched, LaunchedRank
from hvdkit.runtimes import store, target
from hvdkit.runtimes.pins import ALL, framework_of

OWN_WORDS = True
TIMELINE = "timeline.json"
_OF_HOROVODRUN = {
    "--mpi": "--launcher mpirun",
    "--jsrun": "--launcher slurm or mpirun",
    "--hostfile -hostfile": "-H ./FILE",
    "--num-proc": "-np",
    "--min-num-proc": "--min-np",
    "--max-num-proc": "--max-np",
    "--network-interfaces": "--network-interface",
    "--output-filename": "--out",
    "--verbose": "--debug",
    "--log-level": "-x HOROVOD_LOG_LEVEL=LEVEL, or --debug",
    "--log-hide-timestamp": "-x HOROVOD_LOG_HIDE_TIME=1",
    "--check-build -cb": "`hvdkit doctor`",
    "--config-file": "its options, and -x for variables",
    "--autotune-log-file": "-x HOROVOD_AUTOTUNE_LOG=FILE",
    "--disable-cache": "-x HOROVOD_CACHE_CAPACITY=0",
    "--no-stall-check": "--stall-timeout 0",
    "--stall-check-warning-time-seconds --stall-check-shutdown-time-seconds --start-timeout": "--stall-timeout SECONDS",
    "--slots-per-host": "HOST:SLOTS a line of the --host-discovery-script",
    "--blacklist-cooldown-range": "nothing: a host that loses a rank is given up",
    "--reset-limit": "nothing: hosts may change as often as they do",
    "--prefix-output-with-timestamp": "nothing: a line has its rank before it",
    "--mpi-threads-disable --tcp": "nothing: ranks use Gloo, over TCP",
    "--mpi-args": "OMPI_MCA_NAME=VALUE in the environment",
    "--binding-args": "nothing: no rank is bound to cores",
    "--ssh-port -p": "a Port line of ~/.ssh/config",
    "--ssh-identity-file -i": "an IdentityFile line of ~/.ssh/config",
}
# Its options that only set the variable of their name, such as HOROVOD_CACHE_CAPACITY; the first ones take no value.
_VARIABLES_OF_HOROVODRUN = re.compile(
    "--(?:(autotune|(?:hierarchical|torus)-all(?:reduce|gather)|timeline-mark-cycles)|cache-capacity|thread-affinity|"
    "autotune-(?:warmup-samples|steps-per-sample|bayes-opt-max-samples|gaussian-process-noise)|"
    "gloo-timeout-seconds|elastic-timeout|num-nccl-streams)"
)
_WHAT_RUNS_IT = "--framework, --runtime or --python"
_PYTHON = re.compile(r"python(\d(\.\d+)?)?")
_ANSWER_S = 30.0
# A program that saves what it has on SIGTERM has the time for it.
_GRACE_S = 10.0
WORDS = "SCRIPT.py [ARGUMENT]..."  # from here on the words are the program's own
_LIKE_HOROVODRUN = "as horovodrun's"


class LaunchRequest(fields.StartsRanks):
    """Run a program of your own on `np` ranks, as horovodrun does: a script, a module with `-m`, or any command.

    Its framework is that of its imports of Horovod, and decides the runtime.
    """

    program: Annotated[list[str], Argument("the program, and what follows is its own", metavar=WORDS)]
    module: Annotated[bool, Option("the program is a Python module", ("-m", "--module"))] = False
    np: fields.Ranks = 1
    framework: Annotated[str | None, Option(fields.FRAMEWORKS_HELP, shown="that of the program's imports")] = None
    runtime: Annotated[
        str | None, Option("a runtime of `hvdkit runtime list`", metavar="NAME", shown="the framework's")
    ] = None
    python: Annotated[Path | None, Option("an interpreter of yours in place of a runtime; it has a Horovod")] = None
    debug: fields.Debug = False
    profile: Annotated[bool, Option("write Horovod's timeline, and sum up the collectives by kind")] = False
    min_np: Annotated[int | None, Option("elastic: the fewest ranks to continue with"), Field(ge=1)] = None
    max_np: Annotated[int | None, Option("elastic: the most ranks"), Field(ge=1)] = None
    host_discovery_script: Annotated[Path | None, Option("elastic: a program that prints one host:slots per line")] = (
        None
    )
    variables: Annotated[
        list[str] | None,
        Form(r"[A-Za-z_]\w*(=.*)?", "NAME, or NAME=VALUE"),
        Option("a variable of the ranks' environment; may be repeated", ("-x", "--env"), metavar="NAME[=VALUE]"),
    ] = None
    fusion_threshold_mb: Annotated[float | None, Option(_LIKE_HOROVODRUN), Field(ge=0)] = None
    cycle_time_ms: Annotated[float | None, Option(_LIKE_HOROVODRUN), Field(gt=0)] = None
    timeline_filename: Annotated[Path | None, Option(_LIKE_HOROVODRUN)] = None
    network_interface: Annotated[str | None, Option(f"{_LIKE_HOROVODRUN}; a name, or a network such as 10.0.0.0/8")] = (
        None
    )
    gloo: Annotated[bool, Option(f"{_LIKE_HOROVODRUN}; what ranks use anyway")] = False


def run(request: LaunchRequest) -> Launched:
    """Run it to its end. Raises what the launcher raises; a rank's exit code is then the command's exit status."""
    script, placement = Path(request.program[0]), Placement.of(request)
    out = request.out or paths.default_out(script.stem, "launch")
    job, framework = _checked(request, placement, out.absolute())
    say(own_script.train_apart(script, request.np) if script.suffix == ".py" else [])
    with paths.claimed(out, request.overwrite) as folder:
        if request.network_interface and placement.launcher == "direct":
            say([f"--network-interface {request.network_interface}: all ranks are here, and use lo"])
        say([*placement.crowding, f"{shlex.join(job.command())}: {_ranks(request.np)}, logs in {job.log_dir}"])
        then = "the ranks continue, and the result is"
        removals, began = Removals(folder, lambda line: say([f"warning: {line}"]), then), time.monotonic()
        try:
            with followed(job.log_dir, quiet=job.stall_timeout_s > 0):
                LAUNCHERS[placement.launcher].run(job, removals.look)
        except (RunError, KeyboardInterrupt) as error:
            if isinstance(error, RankFailure):
                error.args = (str(error).replace(LESS_MEMORY, "use a smaller batch"),)  # it has no recipe
                error.exit_status = _status(error)
            with suppress(RunError, OSError):  # the failure matters more; before a rank has started there is no file
                _result(job, placement, framework, began, str(error) or "interrupted").written(folder)
            raise
        finally:
            if request.debug:
                collected(job)
        result = _result(job, placement, framework, began)
        if request.profile:
            result.collectives = _collectives(folder / TIMELINE, placement.np)
        return result.written(folder)


def _result(
    job: Job, placement: Placement, framework: str | None, began: float, failure: str | None = None
) -> Launched:
    ends = json.loads((job.log_dir / "exits.json").read_text())
    return Launched(
        command=job.command(),
        framework=framework,
        np=job.np,
        launcher=placement.launcher,
        seconds=round(time.monotonic() - began, 3),
        ranks=[LaunchedRank(**{key: end[key] for key in LaunchedRank.model_fields}) for end in ends],
        failure=failure,
    )


def lines(request: LaunchRequest, result: Launched) -> Iterator[str]:
    """That it has ended."""
    for use in result.collectives or []:
        rate = "" if use.bus_mbit_per_s is None else f", {use.bus_mbit_per_s:.0f} Mbit/s on a link"
        yield (
            f"{use.collective}: {use.operations} of {use.tensors} tensors, {use.bytes / 2**20:.1f} MiB a rank, "
            f"{use.seconds:.2f} s{rate}"
        )
    well = sum(rank.exit_code == 0 for rank in result.ranks)
    yield f"{_ranks(well)} ended well after {result.seconds:.1f} s; written to {result.folder}"


def _collectives(path: Path, np: int) -> list[CollectiveUse]:
    """What the timeline comes to; a damaged or too large one is said, as the program has ended well."""
    from hvdkit.profiling.collectives import used  # NumPy comes with it

    try:
        return used(path, np)
    except RequestError as error:
        say([f"--profile: {error}"])
        return []


def _status(failure: RankFailure) -> int:
    """A rank's own exit code, or 128 and the number of the signal that has ended it; 1 for one that was ended here."""
    if failure.stopped:
        return 1
    known = failure.signal in signal.Signals.__members__
    return failure.exit_code or (128 + signal.Signals[str(failure.signal)] if known else 1)


def _ranks(number: int) -> str:
    return f"{number} rank{'s' if number != 1 else ''}"


def _checked(request: LaunchRequest, placement: Placement, folder: Path) -> tuple[Job, str | None]:
    """The job, which is to run in the folder, and the program's framework, if it is known.

    All is checked that can be before anything starts. Raises RequestError with all faults.
    """
    faults, words = Faults(), request.program
    by_python = request.module or words[0].endswith(".py")
    script = own_script.module_file(words[0]) if request.module else Path(words[0])
    if by_python and script is not None and not script.is_file():
        faults.append(f"{script}: no such file; expected a script, a module after -m, or a command after --")
    framework, python, environment = request.framework, Path(sys.executable), dict[str, str]()
    with faults.collected():
        if by_python and not (request.runtime or request.python or faults):
            root = Path() if request.module else None
            framework = own_script.framework_under(script, words[0], framework, _WHAT_RUNS_IT, root)
        if not faults:
            python, environment = _interpreter(request, framework, by_python)
    if not by_python and shutil.which(words[0], path=environment.get("PATH")) is None:
        faults.append(f"{words[0]}: no such command; expected a script, a module after -m, or a command after --")
    elastic = _elastic(request, faults)
    faults += placement.faults(framework or "", elastic is not None, program=True)
    environment |= _settings(request, folder, faults)
    faults.report()
    command = [str(python), *(["-m"] if request.module else []), *words] if by_python else words
    job = Job(
        python=python,
        arguments=[],
        program=command,
        np=placement.np,
        hosts=placement.hosts,
        environment=environment,
        log_dir=folder / "logs",
        stall_timeout_s=placement.stall_timeout_s,
        grace_s=_GRACE_S,
        elastic=elastic,
    )
    return job, framework


def _interpreter(request: LaunchRequest, framework: str | None, by_python: bool) -> tuple[Path, dict[str, str]]:
    """The interpreter that has the Horovod, and what it adds to the environment. Raises RequestError."""
    if request.python and (request.runtime or request.framework):
        raise RequestError("--python: leave out --runtime and --framework beside it")
    added: dict[str, str] = {}
    if request.python:
        python = _with_horovod(target.runnable(request.python))
        store.link_hvdkit()
        added = store.with_hvdkit()
    elif request.runtime or framework:
        if (name := request.runtime) and name not in ALL:
            raise RequestError(store.unknown("runtime", name, ALL))
        runtime = store.find(framework_of(name) if name else str(framework), name)
        python, added = runtime.python, runtime.environment
    elif _PYTHON.fullmatch(Path(request.program[0]).name) and (own := shutil.which(request.program[0])):
        store.link_hvdkit()
        return _with_horovod(Path(own).absolute(), request.program), store.with_hvdkit()
    elif by_python or not (built := store.installed()):
        raise RequestError("--runtime: expected a runtime of `hvdkit runtime list`, or --python; it serves the ranks")
    else:
        return built[0].python, {}  # for Horovod's rendezvous; the command has the environment that is here
    path = os.pathsep.join([str(python.parent), os.environ.get("PATH", os.defpath)])
    return python, added if by_python else {**added, "PATH": path}


def _with_horovod(python: Path, program: Sequence[str] = ()) -> Path:
    """The interpreter, if it has a Horovod. Raises RequestError; it says how a runtime runs the `program`."""
    code = "import sys; from importlib.util import find_spec; sys.exit(find_spec('horovod') is None)"
    try:
        done = programs.answer([python, "-c", code], _ANSWER_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RequestError(f"{python}: cannot be run ({error})") from None
    if done.returncode != 0:
        leave = f"leave out {program[0]}, so that a runtime runs {program[1]}" if len(program) > 1 else "give --runtime"
        raise RequestError(f"{python}: it has no Horovod; see `hvdkit horovod wheel`, or {leave}")
    return python


def _elastic(request: LaunchRequest, faults: Faults) -> ElasticBounds | None:
    """From how many to how many ranks; without --min-np and --max-np as many as -np."""
    given = request.min_np, request.max_np, request.host_discovery_script
    if given == (None, None, None):
        return None
    least, most = request.min_np or request.np, request.max_np or request.np
    if request.min_np and request.max_np and least > most:
        faults.append(f"--min-np {least}: expected at most --max-np {most}")
    elif not least <= request.np <= most:
        bounds = f"{least} to {most}" if request.max_np else f"at least {least}"
        faults.append(f"-np {request.np}: expected {bounds}, as --min-np and --max-np say")
    if request.cycle_time_ms is not None or "HOROVOD_CYCLE_TIME" in os.environ:
        faults.append("HOROVOD_CYCLE_TIME: expected not to be set in an elastic run; Horovod mixes it up as ranks join")
    return ElasticBounds(least, most, request.host_discovery_script)


def _settings(request: LaunchRequest, folder: Path, faults: Faults) -> dict[str, str]:
    """The variables for horovodrun's options, --debug, --profile and -x."""
    settings = {name: value for name, value in VARIABLES.items() if request.debug and name not in os.environ}
    if request.fusion_threshold_mb is not None:
        settings["HOROVOD_FUSION_THRESHOLD"] = str(int(request.fusion_threshold_mb * 2**20))
    if request.cycle_time_ms is not None:
        settings["HOROVOD_CYCLE_TIME"] = f"{request.cycle_time_ms:g}"
    if request.timeline_filename is not None:
        if request.profile:
            faults.append("--timeline-filename: leave it out beside --profile, which writes a timeline of its own")
        timeline = request.timeline_filename.absolute()
        if not os.access(timeline.parent, os.W_OK) or timeline.is_dir():  # Horovod would say nothing, and write nothing
            faults.append(f"--timeline-filename {timeline}: expected a file in a folder in which you may write")
        settings["HOROVOD_TIMELINE"] = str(timeline)
    if request.network_interface is not None:
        names = ("HOROVOD_GLOO_IFACE", "NCCL_SOCKET_IFNAME")  # NCCL knows no networks: a rank's agent tells it a name
        settings |= dict.fromkeys(names[: 1 if "/" in request.network_interface else 2], request.network_interface)
    for word in request.variables or []:
        name, equals, value = word.partition("=")
        if not equals and name not in os.environ:
            faults.append(f"-x {name}: expected a variable that is set, or {name}=VALUE")
        settings[name] = value if equals else os.environ.get(name, "")
    return settings | ({"HOROVOD_TIMELINE": str(folder / TIMELINE)} if request.profile else {})


def option_of_horovodrun(option: str) -> str | None:
    """What is typed in place of an option of horovodrun that this command has not; None for an unknown one."""
    if variable := _VARIABLES_OF_HOROVODRUN.fullmatch(option):
        return f"-x HOROVOD_{option[2:].replace('-', '_').upper()}={1 if variable[1] else 'VALUE'}"
    return next((here for names, here in _OF_HOROVODRUN.items() if option in names.split()), None)
