"""Ranks that a program of the cluster starts, such as srun or mpirun: Horovod over Gloo, by hvdkit's rendezvous."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence

from hvdkit.handshake import Listener
from hvdkit.launch.agent.interfaces import listening
from hvdkit.launch.agent.task import VARIABLE
from hvdkit.launch.job import AgentCommand, Job, Tick, agent_command
from hvdkit.launch.launchers import elastic
from hvdkit.launch.serve import rendezvous
from hvdkit.launch.supervise import supervise

Command = Callable[[dict[str, str]], Sequence[str]]  # a program's command line, for ranks with this environment

_HERE = "127.0.0.1"
# What ranks on other hosts get of this process's environment, besides what the job adds.
_PASSED = re.compile(
    r"(PATH|LD_LIBRARY_PATH|VIRTUAL_ENV|TZ|LANG|LC_\w+"
    r"|(HVDKIT|HOROVOD|NCCL|GLOO|OMP|GOMP|MKL|KMP|PYTHON|CUDA|TORCH|TF|XLA|KERAS|MXNET|DMLC|WANDB|MLFLOW)_?\w*)"
)
# What is of this machine, this session or a program's own making, and no program's ranks elsewhere get.
_STAYS = re.compile(
    r"BASH_FUNC_.*|HOSTNAME|HOST|(OLD)?PWD|SHLVL|_|TERM|DISPLAY|TMPDIR|LS_COLORS"
    r"|(XDG|DBUS|SSH|SLURM|SALLOC|SRUN|OMPI|PMIX?|PRTE|HYDRA|RAY)_\w*"
)


def run(
    job: Job, program: str, command: Command, launcher: str, peers: Sequence[str], on_tick: Tick | None, **added: str
) -> None:
    """Run the job to its end by a `program`, to whose `command` a rank's is added. Raises as `Launcher.run` does.

    `peers` are names or addresses of the other machines, from which the launcher's has to be reached; `added` is for
    the program's environment. An elastic job's program offers places (elastic_places.py).
    """
    own, addresses = (_HERE, [_HERE]) if job.here and not job.elastic else listening(peers)
    environment = {**job.base_environment(), "HVDKIT_LAUNCHER": launcher, **added}
    rank = agent_command(str(job.python), "task", job, job.command())
    with Listener(own) as listener:
        launch = {"addresses": addresses or [_HERE], "reports": listener.port, "secret": listener.secret}
        if job.elastic is not None:
            environment[VARIABLE] = json.dumps(launch)
            words = [*command(environment), *rank]
            driver = elastic.driver(job, words, environment, name=launcher, cluster=True)
            elastic.supervise(job, driver, on_tick, listener)
            return
        with rendezvous(job, own or "0.0.0.0") as port:
            launch |= {"program": program, "hosts": job.hosts, "np": job.np, "rendezvous": port}
            environment[VARIABLE] = json.dumps(launch)
            supervise(
                job, [AgentCommand(None, [*command(environment), *rank], environment, program)], on_tick, listener
            )


def passed(job: Job, environment: Mapping[str, str]) -> list[str]:
    """The variables of the environment that ranks on other hosts need; a program of the user's may need any.

    horovodrun and srun pass all on.
    """

    def needed(name: str) -> bool:
        if job.program:
            return name.isidentifier() and not _STAYS.fullmatch(name)
        return _PASSED.fullmatch(name) is not None

    names = (name for name in environment if name in job.environment or needed(name))
    return sorted({*names, VARIABLE})
