"""`batch_size: auto`: which batches are tried, what fits, and what the ranks agree on."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hvdkit.checkpoint.resume import _other_rate, as_found, deciding, recounts
from hvdkit.commands.loading import loaded
from hvdkit.errors import RequestError
from hvdkit.recipe import schema
from hvdkit.recipe.schema import Recipe
from hvdkit.runtimes import machine
from hvdkit.worker import fitting
from hvdkit.worker.fitting import LargestBatch
from hvdkit.worker.memory_limits import MemoryUse
from tests.conftest import FRAMEWORKS, ROOT, Hvdkit, rest_thorough

RECIPE = ROOT / "recipes" / "resnet20-digits.yaml"
HEART: Any = SimpleNamespace(beat=lambda phase, step=None: None, phase="")


def recipe(*words: str) -> Recipe:
    return schema.load(RECIPE, ["batch_size=auto", *words])


def setup_of(given: Recipe, ranks: list[LargestBatch] | None = None) -> Any:
    """A rank of two, of 1,000 samples; `ranks` stand for what all have found."""
    topology = SimpleNamespace(local_size=2, local_rank=0, device="cpu", rank=0)
    world = SimpleNamespace(size=2)
    mesh = SimpleNamespace(topology=topology, world=world, data=world, is_root=True)
    answers = [[None, None], ranks]
    adapter = SimpleNamespace(allgather_object=lambda value, group, name: answers.pop(0))
    return SimpleNamespace(recipe=given, mesh=mesh, adapter=adapter, dataset=SimpleNamespace(train=range(1000)))


@pytest.mark.check
@pytest.mark.parametrize(
    ("most", "samples", "by_halves", "expected"),
    [
        (100, 1000, False, [1, 2, 4, 8, 16, 32, 64, 100]),
        (64, 20, False, [1, 2, 4, 8, 16, 20]),
        (48, 1000, True, [3, 6, 12, 24, 48]),
        (48, 20, True, [3, 6, 12]),
        (1, 1, True, [1]),
        (8, 0, False, []),
    ],
)
def test_the_batches_that_are_tried(most: int, samples: int, by_halves: bool, expected: list[int]) -> None:
    assert fitting.sizes(most, samples, by_halves) == expected


@pytest.mark.check
@pytest.mark.parametrize(
    ("files", "limit"),
    [
        ({}, None),
        ({"proc/self/cgroup": "4:memory:/a/b\n0::/\n", "sys/fs/cgroup/memory/a/memory.limit_in_bytes": "4096"}, 4096),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "8192"}, 8192),  # as a container sees its own
        (
            {
                "proc/self/cgroup": "0::/job/step\n",
                "sys/fs/cgroup/job/memory.max": "16384",
                "sys/fs/cgroup/job/step/memory.max": "max",
            },
            16384,
        ),
    ],
)
def test_the_limit_of_a_control_group_and_of_those_above_it(
    files: dict[str, str], limit: int | None, tmp_path: Path
) -> None:
    """A job of Slurm has its limit in a group below the machine's."""
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    whole = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert machine.memory(tmp_path) == (limit or whole)


@pytest.mark.check
@pytest.mark.parametrize(
    ("ends_at", "limits", "batch", "tried"),
    [
        (10**9, (10**12, 10**15, 0), 500, 10),  # as many as a rank has samples
        (10**9, (3_000, 10**15, 0), 16, 5),  # 100 a sample, 200 of gradients: a batch of 32 is not even tried
        (10**9, (10**12, 3_000, 0), 16, 5),  # of address space
        (10**9, (10**12, 10**15, 3_000), 16, 5),  # of a GPU
        (8, (10**12, 10**15, 0), 4, 4),  # the process ends at 8
        (1, (10**12, 10**15, 0), 0, 1),
        (10**9, (1_000, 10**15, 0), 0, 1),
    ],
)
def test_the_largest_batch_by_what_the_process_tells(
    monkeypatch: pytest.MonkeyPatch, ends_at: int, limits: tuple[int, int, int], batch: int, tried: int
) -> None:
    asked, limit = list[int](), min(filter(None, limits))

    class Process:
        def __init__(self, *given: object) -> None: ...

        def __enter__(self) -> Process:
            return self

        def __exit__(self, *raised: object) -> None: ...

        def answer(self) -> Any:
            return {"memory": (500, 500, 0)}

        def ask(self, size: int) -> Any:
            asked.append(size)
            told = 500 + 100 * size
            return None if size >= ends_at else {"memory": (told, told, told - 500), "gradients": 200}

        def fault(self) -> str:
            return ""

    monkeypatch.setattr(fitting, "_Beside", Process)
    monkeypatch.setattr(fitting, "now", lambda: MemoryUse(1_000, 1_000))
    monkeypatch.setattr(fitting, "limits", lambda *place: MemoryUse(*limits))
    found = fitting._largest(setup_of(recipe()), HEART)
    assert (found.batch, asked) == (batch, [*(1 << n for n in range(9)), 500][:tried])
    if batch:
        own = 0 if limits[2] else 1_000
        assert found.needed == own + 200 + 100 * batch and not found.fault, "its own, gradients, and the batch"
    else:
        assert found.fault == f"a batch of 1 does not fit into {limit / 2**20:,.0f} MiB; see `hvdkit plan`"


@pytest.mark.check
def test_all_ranks_take_the_smallest_and_say_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fitting, "_largest", lambda *given: None)  # the ranks' are given
    ranks = [LargestBatch(64, 900 << 20, 950 << 20, 0, "a"), LargestBatch(32, 940 << 20, 950 << 20, 1, "b")]
    chosen = fitting.found(setup_of(recipe("max_batch_size=64"), ranks), HEART, None)
    assert (chosen.batch_size, chosen.accumulate, chosen.max_batch_size) == (32, 1, None)
    assert not chosen.finds_batch_size and schema.revise(chosen.model_dump(), "x") == chosen
    said = "hvdkit: batch_size: 32, the largest that fits (rank 1: 940 of 950 MiB); accumulate 1; learning rate 0.1, "
    assert capsys.readouterr().out == said + "scaled from 0.05\n"
    rest = recipe("max_batch_size=64", "accumulate_rest=true", "accumulate=2", "schedule.scale=none")
    chosen = fitting.found(setup_of(rest, ranks), HEART, None)
    assert (chosen.batch_size, chosen.accumulate, chosen.accumulate_rest) == (32, 4, False)
    assert capsys.readouterr().out.endswith("accumulate 4; learning rate 0.05\n")
    with pytest.raises(RequestError, match="batch_size: rank 1 on b: a batch of 1 does not fit"):
        fitting.found(
            setup_of(rest, [ranks[0], LargestBatch(0, 9, 1, 1, "b", "a batch of 1 does not fit")]), HEART, None
        )


@pytest.mark.check
def test_a_process_that_ends_says_why_unless_memory_was_what_it_lacked(monkeypatch: pytest.MonkeyPatch) -> None:
    for code, expected in (
        ("raise MemoryError", ""),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", ""),
        ("raise ValueError('no such layer')", "ended with status 1: ValueError: no such layer"),
        ("import sys; sys.exit(3)", "ended with status 3: it said nothing"),
    ):
        monkeypatch.setattr(sys, "orig_argv", ["python", "-c", code, "--out", "x", "--resume"])
        with fitting._Beside(recipe(), 0, HEART) as process:
            assert process.answer() is None and process.ask(4) is None
            fault = process.fault()
        assert fault.endswith(expected) and bool(fault) == bool(expected), (code, fault)


@pytest.mark.check
def test_what_it_does_not_go_with_is_refused_by_key() -> None:
    for word, key in (
        ("parallel.pipeline=2", "parallel"),
        ("sharding=optimizer", "sharding"),
        ("elastic.max_np=2", "elastic"),
        ("tune=measure", "tune: measure"),
    ):
        with pytest.raises(RequestError, match=f"batch_size: expected a number with {key}, .*, got auto"):
            recipe(word)
    for word in ("max_batch_size=64", "accumulate_rest=true"):
        key = word.partition("=")[0]
        with pytest.raises(RequestError, match=f"{key}: expected batch_size auto with it, got batch_size 1"):
            recipe("batch_size=1", word)
    request = SimpleNamespace(recipe=RECIPE, overrides=["batch_size=auto"], overrides_from="command line")
    with pytest.raises(RequestError, match="batch_size: expected a number, got auto, which `hvdkit train` finds"):
        loaded(request)
    assert "batch_size: auto" in schema.dump(loaded(request, trains=True))


@pytest.mark.check
def test_a_resumed_run_is_told_of_no_other_batch() -> None:
    """The command compared the checkpoint's batch with the one sample that stands for `auto`."""
    given = recipe("max_batch_size=64", "accumulate_rest=true")
    theirs = given.model_copy(update={"batch_size": 32, "accumulate": 2} | fitting._KNOWN).model_dump()
    assert not recounts(theirs, 2, given, 2) and recounts(theirs, 2, given, 4)
    assert _other_rate(theirs, as_found(given, theirs)) == []
    assert deciding(given) == deciding(schema.revise(theirs, "x")), "it was refused as one of another recipe"
    assert _other_rate(theirs, as_found(recipe().model_copy(update={"batch_size": 16}), theirs))


@pytest.mark.parametrize("framework", rest_thorough(*FRAMEWORKS))
def test_a_run_finds_its_batch_and_a_resumed_one_keeps_it(framework: str, hvdkit: Hvdkit, tmp_path: Path) -> None:
    words = ("train", RECIPE, "--framework", framework, "-np", 2, "--out", tmp_path / "run", "batch_size=auto")
    words += ("model.name=resnet8", "max_batch_size=48", "accumulate_rest=true", "steps=2", "threads=1")
    result = hvdkit(*words, timeout=300)
    assert result.returncode == 0, result.stderr
    assert "batch_size: 48, max_batch_size; accumulate 1; learning rate 0.15, scaled" in result.stdout + result.stderr
    resumed = hvdkit(*words[:-2], "--resume", "steps=4", "threads=1", timeout=300)
    assert resumed.returncode == 0, resumed.stderr
    said = resumed.stdout + resumed.stderr
    assert "batch_size: 48, that of the newest checkpoint" in said and "learning rate is" not in said, said
