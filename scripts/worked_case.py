"""Write docs/worked-case.md: from one published figure to a decision, with what the commands really print.

    .venv/bin/python -m scripts.worked_case

Run it after a change of the simulator; tests/test_worked_case.py compares.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import sys
import tempfile
from pathlib import Path

from hvdkit.cli.app import app

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "worked-case.md"
_MOST_LINES = 24  # of a command that are shown

TEXT = """# A worked case: from one figure to a decision

You shall train ResNet-50 on ImageNet for 90 epochs, by Friday, for at most 500 USD. You have no GPU yet. You think of
renting hosts of 8 V100 with 25 Gbit/s Ethernet: how many, and with which settings? This page goes from one published
figure to the answer in five commands, which need no GPU and no framework. `scripts/worked_case.py` writes what they
print, and a test compares it; repeat them in an empty folder.

## 1. The seed: one published figure

NVIDIA has published that PyTorch trains ResNet-50 in mixed precision with 1,200 images/s on one V100 of 16 GB, with 256
images a batch ([DeepLearningExamples](https://github.com/NVIDIA/DeepLearningExamples), DGX-1). That is enough for a
profile:

$ hvdkit profile --from resnet50 --images-per-second 1200 --batch-size 256 --device V100 --out v100

## 2. How does it scale?

The hosts come with hvdkit as `aws-p3-16xlarge`. A grid over the number of GPUs and the compression of gradients:

$ hvdkit predict v100/profile.json --cluster aws-p3-16xlarge \\
    --sweep n=8,16,...,128 --sweep compression=none,fp16 --out grid

Look at the intervals first. Beyond one host, the upper end is far from the expected time, because nobody has shown that
this framework sends gradients during backward. Within one host (8), communication hardly matters. `grid/sweep.png`
shows the same.

## 3. What if the network is worse than promised?

In a cloud, others use the network too. The same at 16 and 64 GPUs, with a quarter and half of the link taken:

$ hvdkit predict v100/profile.json --cluster aws-p3-16xlarge \\
    --sweep n=16,64 --sweep link.ethernet.busy=0,0.25,0.5 --out busy

## 4. By Friday, for 500 USD

An epoch of ImageNet has 1,281,167 images. Friday is 60 hours away, so that this page does not depend on the day:

$ hvdkit advise v100/profile.json --cluster aws-p3-16xlarge -n 64 \\
    --images 1281167 --epochs 90 --budget 500 --deadline 60h --out advice

The lines that begin with *within* answer the question: both ways keep to the budget and the deadline even at the slow
end of their intervals. The list below them is for the 64 V100 that were asked for.

## 5. What if hosts are taken away?

Spot instances cost less, but are taken away. Once in 20 hours for each host:

$ hvdkit advise v100/profile.json --cluster aws-p3-16xlarge -n 8 \\
    --images 1281167 --epochs 90 --budget 500 --deadline 60h --spot-interruption 0.05 --out spot

## The decision

- **Rent the cheapest way of step 4.** It is one host, so its speed does not depend on a network between hosts, and its
  global batch of 2,048 is known to train well with a warm-up (Goyal et al. 2017). Newer GPUs cost more by the hour, and
  less for the training. Lost hosts (step 5) change little, since the training is short.
- **More hosts buy time, not money.** The fastest way costs about the same, but its global batch is one whose accuracy
  you have to check.
- **What would change the decision.** The H100's speed is scaled from a table (`relative_speed`), and its price is of
  December 2024: a published figure of that GPU, through step 1 again, and today's price by `--price` decide better.
  Then the first hour on the rented host replaces all of it by a profile of your own recipe, `hvdkit profile RECIPE
  -np 8`, and rated links by measured ones, `hvdkit bench allreduce`.
- **What stays unknown**: whether the host reads and decodes 1,281,167 JPEG images fast enough for its GPUs. A published
  figure does not say it ([what is not simulated](simulator.md#what-it-does-not-simulate)).
"""


def page() -> str:
    """The page, each line that begins with $ replaced by the command and what it prints."""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        return re.sub(r"^\$ ((?:.*\\\n)*.*)$", lambda found: _fenced(found[1]), TEXT, flags=re.MULTILINE)


def _fenced(command: str) -> str:
    text = _run(command).replace(f"{Path.cwd()}{os.sep}", "")
    printed = [line.rstrip() for line in text.splitlines() if line.strip()]
    shown = printed if len(printed) <= _MOST_LINES else [*printed[: _MOST_LINES - 1], "…"]
    return "\n".join(["```", f"$ {command}", *shown, "```"])


def _run(command: str) -> str:
    """What a command of hvdkit prints. Raises SystemExit if it fails."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        status = app(shlex.split(command.replace("\\\n", " "))[1:], standalone_mode=False)
    if status:
        raise SystemExit(f"{command}: status {status}")
    return printed.getvalue()


def main() -> None:
    """Write the page."""
    PAGE.write_text(page(), encoding="utf-8")
    print(PAGE.relative_to(ROOT), file=sys.stderr)


if __name__ == "__main__":
    main()
