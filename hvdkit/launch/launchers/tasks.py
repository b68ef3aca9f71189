"""Ranks that a program of the cluster starts, such as srun or mpirun: Horovod over Gloo, by hvdkit's rendezvous."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence

from hvdkit.handshake import Listener
from hvdkit.launch.agent.interfaces import listening
from hvdkit.launch.agent.task import VARIABLE as VARIABLE
from hvdkit.launch.agent_command import AgentCommand, agent_command
from hvdkit.launch.job import Job, Tick
from hvdkit.launch.launchers import elastic
from hvdkit.launch.serve import rendezvous
from hvdkit.launch.supervise import supervise

_HERE = "127.0.0.1"
# What ranks on other hosts get of this process's environment, besides what the job adds.
_PASSED = re.compile(
    r"(PATH|LD_LIBRARY_PATH|VIRTUAL_ENV|TZ|LANG|LC_\w+"
    r"|(HVDKIT|HOROVOD|NCCL|GLOO|OMP|GOMP|MKL|KMP|PYTHON|CUDA|TORCH|TF|XLA|KERAS|MXNET|DMLC|WANDB|MLFLOW)_?\w*)"
)


def run(
    job: Job,
    command: Callable[[dict[str, str]], Sequence[str]],
    launcher: str,
    peers: Sequence[str],
    added: dict[str, str],
    on_tick: Tick | None,
    program: str | None = None,
) -> None:
    """Run the job to its end: `command` gets the ranks' environment, and returns the program's command line, to which a
    rank's is added.

    `peers` are names or addresses of the other machines, from which the launcher's has to be reached; `added` is for
    the program's environment. The program goes by its name in messages and logs, or by `program`. Raises as `supervise`
    does.
    """
    own, addresses = (_HERE, [_HERE]) if job.here else listening(peers)
    with rendezvous(job, own or "0.0.0.0") as port, Listener(own) as listener:
        environment = {**job.base_environment(), "HVDKIT_LAUNCHER": launcher, **added}
        words = command(environment)
        launch = {
            "program": program or words[0],
            "hosts": [(host.name, host.slots) for host in job.hosts],
            "np": job.np,
            "addresses": addresses,
            "rendezvous": port,
            "reports": listener.port,
            "secret": listener.secret,
        }
        environment[VARIABLE] = json.dumps(launch)
        rank = agent_command(str(job.python), "task", job, job.command())
        supervise(job, [AgentCommand(None, [*words, *rank], environment, name=program or words[0])], on_tick, listener)


def run_elastic(
    job: Job,
    command: Callable[[dict[str, str]], Sequence[str]],
    launcher: str,
    peers: Sequence[str],
    on_tick: Tick | None,
) -> None:
    """Run an elastic job to its end: the command line is that of a program that offers places (elastic_places.py).

    Raises as `elastic.supervise` does.
    """
    own, addresses = listening(peers)
    with Listener(own) as listener:
        launch = {"addresses": addresses or [_HERE], "reports": listener.port, "secret": listener.secret}
        environment = {**job.base_environment(), "HVDKIT_LAUNCHER": launcher, VARIABLE: json.dumps(launch)}
        rank = agent_command(str(job.python), "task", job, job.command())
        driver = elastic.driver(job, [*command(environment), *rank], environment, name=launcher, cluster=True)
        elastic.supervise(job, driver, on_tick, listener=listener)


def passed(job: Job, environment: Mapping[str, str]) -> list[str]:
    """The variables of the environment that ranks on other hosts need."""
    names = (name for name in environment if name in job.environment or _PASSED.fullmatch(name))
    return sorted({*names, VARIABLE})
