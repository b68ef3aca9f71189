"""The command line of an agent, and of what it starts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hvdkit.launch.agent.reports import RANKS
from hvdkit.launch.job import HANG_SHARE, Job

_AGENT = Path(__file__).with_name("agent") / "rank_agent.py"
# horovodrun is given a little longer than its ranks: once they are gone it waits 5 s for a shell that it has frozen.
LAUNCHER_GRACE_S = 1.0


@dataclass(frozen=True)
class AgentCommand:
    """A command that an agent starts: the rank that it is (None: a program that starts ranks), its environment.

    `enter` is a command prefix for the agent itself, such as nsenter. A program goes by its `name`.
    """

    rank: int | None
    command: list[str]
    environment: dict[str, str]
    enter: tuple[str, ...] = ()
    name: str = "horovodrun"  # Horovod's elastic driver too


def agent_command(python: str, role: str, job: Job, command: list[str]) -> list[str]:
    """The command line of an agent in that role (agent/rank_agent.py) that starts `command`.

    Without site packages it starts in 0.05 s.
    """
    grace_s = job.grace_s + (0.0 if role in RANKS else LAUNCHER_GRACE_S)
    settings = [str(job.log_dir.absolute()), str(grace_s), str(HANG_SHARE * job.stall_timeout_s)]
    return [python, "-I", "-S", str(_AGENT), role, *settings, *command]
