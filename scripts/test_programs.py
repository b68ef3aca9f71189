"""Install what tests start besides Python: Chromium, Open MPI and Slurm, as Debian's packages.

    python scripts/test_programs.py [--services]

Needs root and apt-get; elsewhere the tests that need a program are left out, and name the command. Packages that bring
services are installed only where no systemd runs, as in a container, where nothing starts them; `--services` installs
them anyway.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

# A program, and the packages that bring it.
PROGRAMS = {"chromium": ["chromium", "fonts-dejavu-core"], "mpirun": ["openmpi-bin"]}
SERVICES = {"slurmctld": ["slurm-wlm", "munge"]}
OTHER_NAMES = {"chromium": ("chromium-browser", "google-chrome")}
_PATH = f"{os.environ.get('PATH', '/usr/bin:/bin')}:/usr/sbin:/sbin"


def missing(services: bool) -> list[str]:
    """The packages of the programs that are not there."""
    packages = []
    for program, names in (PROGRAMS | SERVICES if services else PROGRAMS).items():
        if not any(shutil.which(name, path=_PATH) for name in (program, *OTHER_NAMES.get(program, ()))):
            packages += names
    return packages


def main() -> int:
    """Install what is missing; the exit status is 0, since the tests name what they miss."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--services", action="store_true", help="packages that bring services too")
    services = parser.parse_args().services or not Path("/run/systemd/system").is_dir()
    packages = missing(services)
    if not packages or os.geteuid() != 0 or shutil.which("apt-get") is None:
        return 0
    print(f"installing Debian's {', '.join(packages)} (apt-get), for tests", flush=True)
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    install = ["apt-get", "-qq", "install", "--no-install-recommends", *packages]
    for command in (["apt-get", "-qq", "update"], install):
        done = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        if done.returncode != 0:
            print(f"`{' '.join(command)}` failed; the tests that need them say so", file=sys.stderr)
            break
    return 0


if __name__ == "__main__":
    sys.exit(main())
