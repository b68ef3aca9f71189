"""metrics.jsonl while a run writes it: removed, cut short, damaged, of any size."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hvdkit.commands.checked_run import MetricsTail
from hvdkit.core.step_plan import Progress
from hvdkit.errors import RequestError
from hvdkit.handlers.metrics_file import MetricsFile
from hvdkit.results.doubts import damage
from hvdkit.results.train import MetricLine, TrainResult, read_metrics
from tests import hygiene


def line(step: int, **more: Any) -> MetricLine:
    return MetricLine(step=step, total_steps=9, epoch=0, loss=1.0, learning_rate=0.1, images_per_second=9.0, **more)


def followed(path: Path) -> tuple[MetricsFile, MetricsTail, list[int]]:
    """A file of metrics with lines of steps 1 to 3 that rank 0 writes and the launcher follows."""
    seen: list[int] = []
    tail, file = MetricsTail(path, lambda line: seen.append(line.step)), MetricsFile(path)
    for step in (1, 2, 3):
        file.write(line(step))
    tail.poll()
    return file, tail, seen


@pytest.mark.parametrize("fault", ["removed", "folder removed", "renamed", "replaced", "by another file"])
def test_metrics_that_are_removed_come_back_with_all_lines(fault: str, tmp_path: Path) -> None:
    path = tmp_path / "run" / "metrics.jsonl"
    path.parent.mkdir()
    file, tail, seen = followed(path)
    assert not tail.lost()
    if fault == "removed":
        path.unlink()
    elif fault == "folder removed":
        shutil.rmtree(path.parent)
    elif fault == "renamed":
        path.parent.rename(tmp_path / "other")
    else:
        (tmp_path / "new").write_text(path.read_text() if fault == "replaced" else "{}\n")
        (tmp_path / "new").replace(path)
    file.write(line(4))
    tail.poll()
    assert [each.step for each in read_metrics(path)] == [1, 2, 3, 4]
    assert seen == [1, 2, 3, 4], "each is passed on once"
    assert "removed or replaced" in tail.lost() and not tail.lost()
    path.unlink()
    file.keep()  # at the end, without a further line
    assert [each.step for each in read_metrics(path)] == [1, 2, 3, 4]


def test_a_file_that_rank_0_makes_anew_before_its_first_line_was_not_removed(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tail, file = MetricsTail(path, lambda line: None), MetricsFile(path)
    tail.poll()
    file.forget_after(Progress(), recounted=False)
    file.write(line(1))
    tail.poll()
    assert not tail.lost()


def test_metrics_that_are_cut_short_are_followed_from_there_and_it_is_said(tmp_path: Path) -> None:
    file, tail, seen = followed(tmp_path / "metrics.jsonl")
    os.truncate(tmp_path / "metrics.jsonl", 0)
    file.write(line(4))
    tail.poll()
    assert seen == [1, 2, 3, 4] and "cut short" in tail.lost()


def test_damaged_lines_are_left_out_and_counted_and_a_torn_one_is_not(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    texts = [line(step).model_dump_json().encode() for step in range(1, 6)]
    torn = texts[4][:40]
    path.write_bytes(b"\n".join([texts[0], b"\0" * 300, texts[1][:-3], texts[2], texts[3], torn]))
    file = MetricsFile(path)
    file.forget_after(Progress(step=3), False)
    assert path.read_bytes() == texts[0] + b"\n" + texts[2] + b"\n"
    assert file.notes == [f"{path}: 2 damaged line(s) are left out"]
    path.write_bytes(texts[0] + b"\n" + torn)
    assert damage(path) == [] and [each.step for each in read_metrics(path)] == [1]
    path.write_bytes(torn + b"\n" + texts[0] + b"\n")
    result = TrainResult.model_construct().at(tmp_path)
    with pytest.raises(RequestError, match=r"metrics.jsonl: line 1 is damaged; .*--resume"):
        result.lines()


def test_a_file_of_metrics_of_any_size_is_read_in_little_memory(tmp_path: Path) -> None:
    """In a process of its own, whose memory is limited to less than the file's size."""
    path = tmp_path / "metrics.jsonl"
    text = (line(1).model_dump_json(exclude_none=True) + "\n").encode()
    with path.open("wb") as file:
        file.write(b"[" * 2**26 + b"\n")  # a line without end: it must not be in memory either
        file.write(text * 20_000)
    code = f"""
import resource
from pathlib import Path
from hvdkit.handlers.metrics_file import MetricsFile
from hvdkit.core.step_plan import Progress
from hvdkit.report import csv_files
from hvdkit.results.train import read_metrics
path = Path({str(path)!r})
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
MetricsFile(path).forget_after(Progress(step=2), False)
csv_files.save_metrics(path.with_name("metrics.csv"), lambda: read_metrics(path))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=hygiene.patience(120)
    )
    assert int(done.stdout) < 2**15, "more than 32 MiB"
    assert path.read_bytes() == text * 20_000
    assert (tmp_path / "metrics.csv").read_text().count("\n") == 20_001
