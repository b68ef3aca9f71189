"""What predictions start from: a profile's workload and settings, and how well the model meets its own step."""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import ValidationError

from hvdkit.errors import RequestError
from hvdkit.results.profile import Profile
from hvdkit.simulator import curves, engine, step
from hvdkit.simulator.cluster import Cluster, Device, Level, Measured, Piece, Software
from hvdkit.simulator.costs import Network, hop_pieces
from hvdkit.simulator.settings import Compression, Settings, Sync, case
from hvdkit.simulator.wire import METHODS
from hvdkit.simulator.workload import Workload, of_profile, sync_of

_LEAST = 3.0  # percent that no figure is believed closer
_UNCHECKED = 10.0  # percent, where the profile's own step could not be predicted


@dataclass(frozen=True)
class Basis:
    """What predictions start from: a rank's own work, and the settings `known` that it was measured under.

    `check_percent` is how far the model misses the profile's own step, None where that cannot be told; `overlap_shown`
    says that in the profile more communication lay under compute than beside it; it had so many `ranks`, on CPUs where
    `on_cpu` says so.
    """

    workload: Workload
    known: Settings
    check_percent: float | None = None
    overlap_shown: bool = False
    ranks: int = 1
    on_cpu: bool = False

    @property
    def believed_percent(self) -> float:
        """By how much compute is believed off at least."""
        return _UNCHECKED if self.check_percent is None else max(_LEAST, abs(self.check_percent))


def basis(profile: Profile) -> Basis:
    """The workload of a profile, with its own settings as defaults: how it compressed, met and added up too."""
    every, allreduce = sync_of(profile), profile.settings.get("allreduce")
    known = Settings(
        policy="horovod" if profile.device != "cpu" else "grouped",
        compression=_compression(profile),
        sync=Sync(every=every) if every > 1 else None,
        allreduce=allreduce if allreduce in ("hierarchical", "central") else None,
        fusion_threshold_mib=profile.tuning.fusion_threshold_bytes / 2**20,
        cycle_time_ms=profile.tuning.cycle_time_ms,
    )
    workload = of_profile(profile)
    overlapped = profile.step.overlapped_communication_ms.mean > profile.step.exposed_communication_ms.mean > 0
    check = _check(profile, workload, known)
    return Basis(workload, known, check, overlapped, profile.np, on_cpu=profile.device == "cpu")


def own_network(profile: Profile) -> Cluster | None:
    """What the run's own links are by the collectives that were timed in it; None where there are too few."""
    timed = [each for each in profile.latencies if each.operation == "allreduce" and each.ms.median > 0]
    if profile.np < 2 or len({each.bytes for each in timed}) < 2:
        return None
    sizes, seconds = [each.bytes for each in timed], [1e-3 * each.ms.median for each in timed]
    pieces = curves.fit(sizes, seconds)
    measured = Measured(
        operation="allreduce",
        ranks=profile.np,
        ranks_per_host=max(1, profile.np // profile.hosts),
        pieces=pieces,
        residual_percent=min(1000.0, curves.residual_percent(pieces, sizes, seconds)),
        smallest_bytes=min(sizes),
        largest_bytes=max(1, *sizes),
    )
    return Cluster(
        schema_version=1,
        name="of-the-profile",
        source=f"allreduces of {profile.np} ranks on {profile.hosts} host(s), timed by `hvdkit profile` between steps",
        ranks_per_host=measured.ranks_per_host,
        device=Device(name=profile.processor[:100] or profile.device),
        levels=[Level(name="link", pieces=hop_pieces(measured))],
        software=Software(synchronous=profile.device == "cpu"),
        measured=[measured],
    )


def _check(profile: Profile, workload: Workload, known: Settings) -> float | None:
    """Percent by which the model misses the step that was profiled, over the links that were timed with it."""
    network = own_network(profile)
    if network is None and profile.np > 1:
        return None
    ranks = profile.np if network else 1
    only = network or Cluster(
        schema_version=1,
        name="none",
        device=Device(name=profile.device),
        levels=[Level(name="none", pieces=[Piece(from_bytes=0, latency_us=0.0, mbit_per_s=1.0)])],
    )
    made = case(workload, Network(only, ranks), Settings(), known)
    waiting = 1e-3 * profile.step.waiting_ms.mean
    seconds = float(engine.run(step.detailed(made)).period) + waiting
    return 100 * (1e3 * seconds / profile.step.step_ms.mean - 1) if profile.step.step_ms.mean > 0 else None


def _compression(profile: Profile) -> Compression:
    """What the profile was compressed by, as its recipe tells; its name alone where that is not understood.

    Raises RequestError for a value that no recipe has.
    """
    told = profile.settings.get("compression", profile.compression)
    told = told if isinstance(told, dict) else {"method": profile.compression}
    keys = {key: told[key] for key in ("method", "ratio", "rank") if key in told}
    try:
        found = Compression.model_validate(keys)
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        key = ".".join(map(str, ("settings", "compression", *fault["loc"])))
        raise RequestError(f"the profile's {key}: {fault['msg']}, got {str(fault['input'])[:60]!r}") from None
    return found if found.method in METHODS else Compression()
