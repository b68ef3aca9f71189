"""Write docs/reference/file-keys.md: each key of a cluster file and of profile.json, with unit, default and example.

All of it comes from the classes that read these files and from files that they read, so it cannot be out of date:
`python -m scripts.schemas` writes it, and tests/test_schemas.py compares.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from hvdkit.profiling import batch_curves, published
from hvdkit.results.profile import Profile
from hvdkit.simulator import cluster as clusters
from hvdkit.simulator.cluster import Cluster
from scripts import reference

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "reference" / "file-keys.md"
# Units by the end of a key's name, the longest first, and of the keys whose names have none.
_ENDS = {
    "mbit_per_s": "Mbit/s", "bytes_per_s": "bytes/s", "us_per_rank": "µs", "us_per_doubling": "µs",
    "per_gpu_hour": "`currency`", "_us": "µs",
    "_ms": "ms", "_mib": "MiB", "_bytes": "bytes", "percent": "%", "_share": "fraction of 1",
}  # fmt: skip
_UNITS = {
    **dict.fromkeys(("mean", "median", "low", "high", "Communication.ms"), "ms"),
    "BatchFit.per_sample_ms": "ms a sample",
    **dict.fromkeys(("jitter", "busy", "contention"), "fraction of 1"),
    **dict.fromkeys(("ranks", "ranks_per_host", "shared_memory_ranks", "np"), "ranks"),
    **dict.fromkeys(("bytes", "bytes_per_step"), "bytes"),
    "ports": "links", "streams": "collectives",
    "oversubscription": "factor", "relative_speed": "P100 = 1", "hosts": "hosts",
    "batch_size": "samples", "train_samples": "samples", "units_per_sample": "`unit`",
    "threads": "threads", "accumulate": "batches",
    "measured_steps": "steps",
    "tensors": "gradients", "samples": "times", "cache_capacity": "entries", "turns": "pairs", "shape": "elements",
}  # fmt: skip
# What a profile of a published figure has not, as a run of several ranks on GPUs has it.
_MEASURED: dict[str, Any] = {
    "framework": "pytorch", "framework_version": "2.13.0", "horovod_version": "0.28.1", "launcher": "direct",
    "slowest": {"rank": 3, "host": "node1", "behind_ms": 4.2, "last_share": 0.81},
    "communications": [
        {"operation": "allreduce", "tensors": 62, "bytes": 1089896, "start_ms": 41.5, "ms": 6.3, "link_bytes": 1.1e6},
    ],
    "link": {
        "interface": "eth0", "rated_mbit_per_s": 25e3, "measured_mbit_per_s": 21.2e3, "achieved_mbit_per_s": 18.9e3,
    },
    "cost": {
        "with_ms": 52.1, "without_ms": 51.8, "percent": 0.6, "turns": 10, "low_percent": -0.4, "high_percent": 1.5,
    },
}  # fmt: skip

HEAD = """# The keys of cluster files and of profile.json

Every key of the two files that `hvdkit predict` and `hvdkit advise` read, with its unit, its default and an example.
`scripts/schemas.py` writes this page from the classes that read the files. [cluster-files.md](../cluster-files.md)
explains cluster files and how to write one, [profile.md](../profile.md) how a profile is measured, and
[simulator.md](../simulator.md#from-a-published-figure) how to make one from a published figure.

An unknown key, a missing one and a value out of range are refused, with a line for each. `null` stands for unknown.
"""


def page() -> str:
    """The whole page."""
    parts = [HEAD]
    for title, model, examples in (
        ("Cluster files", Cluster, list(_clusters())),
        ("profile.json", Profile, list(_profiles())),
    ):
        parts.append(f"## {title}\n")
        for name, kind, values in sections(model, examples):
            parts.append(f"### `{name}`\n" if name else "")
            parts.append("\n".join(_table(kind, values)) + "\n")
    return "\n".join(part for part in parts if part)


def _clusters() -> Iterator[dict[str, Any]]:
    for name in ["aws-p3-16xlarge", *clusters.shipped()]:
        yield clusters.load(Path(name)).model_dump()


def _profiles() -> Iterator[dict[str, Any]]:
    whole, half = (published.profile("resnet50", *of, "a100") for of in ((2470, 256), (2306, 128)))
    made = batch_curves.combined(whole, [half]).model_dump()
    spread, rank = made["step"]["step_ms"], {**made["ranks"][0], "host": "node1"}
    latency = {"operation": "allreduce", "bytes": 65536, "ms": spread, "samples": 20}
    memory = made["memory"] | {"peak_rss_mib": 3120.5, "device_peak_mib": 14210.5}
    more = {"latencies": [latency], "memory": memory, "ranks": [rank]}
    yield Profile.model_validate(made | _MEASURED | more).model_dump()


def sections(model: type[BaseModel], examples: list[Any]) -> Iterator[tuple[str, type[BaseModel], list[Any]]]:
    """The sections of a file: the keys that lead to each, its class, and examples of it."""
    for place, kind in reference.sections(model):
        held = examples
        for key in place.split(".") if place else ():
            values = (value.get(key) for value in held)
            held = [each for one in values for each in (one if isinstance(one, list) else [one]) if each is not None]
        yield place, kind, held


def _table(kind: type[BaseModel], values: list[Any]) -> Iterator[str]:
    yield "| key | unit | default | meaning | example |"
    yield "|---|---|---|---|---|"
    for key, field in kind.model_fields.items():
        example = "below" if _holds_sections(field) else _example(key, values)
        yield reference.row(f"`{key}`", unit(kind, key, field), _default(field), str(field.description), example)


def _holds_sections(field: FieldInfo) -> bool:
    return any(reference.classes(field.annotation))


def unit(kind: type[BaseModel], key: str, field: FieldInfo) -> str:
    """The unit of a key, empty for texts, sections and switches."""
    by_end = next((unit for end, unit in _ENDS.items() if key.endswith(end)), "")
    known = _UNITS.get(f"{kind.__name__}.{key}") or by_end or _UNITS.get(key, "")
    return "" if _holds_sections(field) and known != "ms" else known


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    return "below" if isinstance(value, BaseModel) else f"`{_text(value)}`"


def _example(key: str, values: list[Any]) -> str:
    """The first value that a file has and that says something."""
    found = [value[key] for value in values if value.get(key) not in (None, "", [], {})]
    text = _text(max(found, key=lambda value: value not in (0, 1, False), default=None))
    return f"`{text}`" if len(text) <= 60 else f"`{text[:56]} …`"


def _text(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else json.dumps(value, ensure_ascii=False)
