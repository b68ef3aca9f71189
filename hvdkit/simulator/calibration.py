"""What predictions start from: a profile's workload and settings, and the model's error on the profile's own step."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from pydantic import ValidationError

from hvdkit.errors import RequestError
from hvdkit.recipe.faults import explain
from hvdkit.results.profile import Profile
from hvdkit.simulator import case_memory, crowding, piecewise_linear, step, what_ifs
from hvdkit.simulator.cluster import Cluster, CurvePiece, Device, Level, Measured, Software
from hvdkit.simulator.compression_costs import METHODS, CompressionSetting
from hvdkit.simulator.costs import ClusterLinks
from hvdkit.simulator.crowding import MIXED
from hvdkit.simulator.jitter import slowest
from hvdkit.simulator.measured_costs import level
from hvdkit.simulator.settings import Settings, SyncSetting
from hvdkit.simulator.step import Case
from hvdkit.simulator.workload import Workload, of_profile, sharding_of, sync_of

_LEAST_ERROR = 3.0  # percent; no figure is assumed to be closer
_MOST_SCALED = 1.5  # compute that is off by more is no detail that the model leaves out
_UNCHECKED_ERROR = 10.0  # percent, if the profile's own step cannot be predicted
LONE = Cluster(  # of one rank, which sends nothing
    schema_version=1,
    name="one-rank",
    device=Device(name="any"),
    levels=[Level(name="none", pieces=[CurvePiece(from_bytes=0, latency_us=0.0, mbit_per_s=1.0)])],
)


@dataclass(frozen=True)
class Calibration:
    """A rank's own work, and the settings `known` under which it was measured.

    `check_percent` is the model's error on the profile's own step, None if it cannot be computed. `overlap_shown` says
    that more of the profile's communication was hidden under compute than exposed. The profile has `ranks` ranks on
    `hosts` hosts, on devices named `processor`, in `mixed` precision or not. With `measured_jitter` the workload's is
    measured, so none is assumed.
    """

    workload: Workload
    known: Settings
    check_percent: float | None = None
    overlap_shown: bool = False
    ranks: int = 1
    on_cpu: bool = False
    processor: str = ""
    measured_jitter: bool = False
    hosts: int = 1
    mixed: bool = False

    @property
    def error_percent(self) -> float:
        """The least expected error of compute."""
        return _UNCHECKED_ERROR if self.check_percent is None else max(_LEAST_ERROR, abs(self.check_percent))

    def crowding(self, case: Case) -> float:
        """By what factor compute takes longer than in the profile, as more ranks share a host, or hosts a step.

        CPUs have none: nothing is known.
        """
        asked = case.workload.precision
        mixed = self.mixed if asked == self.workload.precision else asked in MIXED
        return 1.0 if self.on_cpu else crowding.factor(self.ranks, self.hosts, mixed, case.network)

    def jitter(self, cluster: Cluster) -> float:
        """The coefficient of variation of compute: what was measured, else what is assumed of the cluster."""
        return self.workload.jitter if self.measured_jitter else max(self.workload.jitter, cluster.jitter)

    def case(self, cluster: Cluster, ranks: int, settings: Settings) -> Case:
        """The what-if `settings` of this workload, on so many ranks of a cluster; what is None is as in `known`."""
        chosen = self.known.model_copy(update={key: value for key, value in settings if value is not None})
        work = what_ifs.applied(self.workload, settings, cluster.device)
        compression, sync, allreduce = chosen.compression or CompressionSetting(), chosen.sync, chosen.allreduce
        mib, cycle_ms = chosen.fusion_threshold_mib, chosen.cycle_time_ms
        # hvdkit packs gradients unless Horovod takes them as they are; the profile timed this for its own settings
        same = (sync, allreduce) == (self.known.sync, self.known.allreduce)
        own = compression == self.known.compression and (same or compression.method not in ("none", "fp16"))
        return Case(
            workload=work,
            network=ClusterLinks(cluster, ranks, chosen.hosts),
            policy=chosen.policy or "horovod",
            compression=compression,
            compression_s=self.workload.compression_s or None if own else None,
            algorithm=allreduce,
            threshold_bytes=(64.0 if mib is None else mib) * 2**20,
            cycle_s=1e-3 * (1.0 if cycle_ms is None else cycle_ms),
            bucket_bytes=chosen.bucket_mib * 2**20,
            piece_bytes=chosen.piece_mib * 2**20,
            every=sync.every if sync else 1,
            servers=chosen.servers,
            sharding=chosen.sharding or "none",
            streams=1 if cluster.software.synchronous else chosen.streams or cluster.software.streams,
            batch=(chosen.batch_size or work.batch_size) / work.batch_size,
            accumulate=chosen.accumulate,
            speed=chosen.speed,
            jitter=self.jitter(cluster) if chosen.jitter is None else chosen.jitter,
            seed=chosen.seed,
        )


def calibrate(profile: Profile) -> Calibration:
    """The workload of a profile, with the profile's own settings as defaults."""
    every, allreduce = sync_of(profile), profile.settings.get("allreduce")
    known = Settings(
        policy="horovod" if profile.device != "cpu" else "grouped",
        compression=_compression(profile),
        sync=SyncSetting(every=every) if every > 1 else None,
        allreduce=allreduce if allreduce in ("hierarchical", "central") else None,
        sharding=sharding_of(profile),
        fusion_threshold_mib=profile.tuning.fusion_threshold_bytes / 2**20,
        cycle_time_ms=profile.tuning.cycle_time_ms,
    )
    recipe = case_memory.recipe_of(profile)
    work = replace(
        of_profile(profile),
        recipe=recipe,
        framework=profile.framework,
        published=bool(profile.published),
        precision=profile.precision,
        shape=case_memory.shape_of(profile, recipe),
    )
    fitted = Calibration(
        work,
        known,
        overlap_shown=profile.step.overlapped_communication_ms.mean > profile.step.exposed_communication_ms.mean > 0,
        ranks=profile.np,
        on_cpu=profile.device == "cpu",
        processor=profile.processor,
        measured_jitter=not profile.published and profile.measured_steps > 1,
        hosts=profile.hosts,
        mixed=profile.precision in MIXED,
    )
    return _as_measured(profile, replace(fitted, check_percent=_check(profile, fitted)))


def _as_measured(profile: Profile, fitted: Calibration) -> Calibration:
    """With compute and update scaled so that the profile's own ranks, over its own links, take the step that it has.

    The error of the model remains in `check_percent`. Where the step would need compute that is off by more than
    _MOST_SCALED, nothing is scaled.
    """
    own = own_network(profile)
    if fitted.check_percent is None:
        return fitted
    base, target = fitted.case(own or LONE, profile.np, Settings()), 1e-3 * profile.step.step_ms.mean
    waits = float(slowest(profile.np, base.every, base.jitter, base.seed).mean())
    low, high = 1 / _MOST_SCALED, _MOST_SCALED
    for _ in range(3):
        factors = np.linspace(low, high, 17)
        seconds = step.periods([replace(base, slow=waits * float(factor)) for factor in factors])
        after = int(np.searchsorted(seconds, target))
        if not 0 < after < len(factors):
            return fitted
        low, high = factors[after - 1 : after + 1]
    factor = float(np.interp(target, seconds[after - 1 : after + 1], (low, high)))
    work = fitted.workload
    scaled = replace(
        work,
        forward=tuple((name, factor * layer_s) for name, layer_s in work.forward),
        tensors=tuple(replace(tensor, segment_s=factor * tensor.segment_s) for tensor in work.tensors),
        tail_s=factor * work.tail_s,
        earlier_s=factor * work.earlier_s,
        update_s=factor * work.update_s,
        compression_s=factor * work.compression_s,
    )
    return replace(fitted, workload=scaled)


def own_network(profile: Profile) -> Cluster | None:
    """The links of the profiled run, from the collectives that it timed; None if these are too few."""
    timed = [latency for latency in profile.latencies if latency.operation == "allreduce" and latency.ms.median > 0]
    if profile.np < 2 or len({latency.bytes for latency in timed}) < 2:
        return None
    timed.sort(key=lambda latency: latency.bytes)
    sizes, seconds = [latency.bytes for latency in timed], [1e-3 * latency.ms.median for latency in timed]
    # A few repeats of each, the small ones first, when much is done for the first time: falls are noise.
    pieces = piecewise_linear.fit(sizes, np.exp(piecewise_linear.not_falling(np.log(seconds))).tolist())
    in_memory = profile.device == "cpu" and profile.shared_memory_ranks == profile.np
    measured = Measured(
        operation="allreduce",
        ranks=profile.np,
        algorithm="memory" if in_memory else "ring",
        ranks_per_host=max(1, profile.np // profile.hosts),
        pieces=pieces,
        residual_percent=min(1000.0, piecewise_linear.residual_percent(pieces, sizes, seconds)),
        smallest_bytes=min(sizes),
        largest_bytes=max(1, *sizes),
    )
    return Cluster(
        schema_version=1,
        name="of-the-profile",
        source=f"allreduces of {profile.np} ranks on {profile.hosts} host(s), timed by `hvdkit profile` between steps",
        ranks_per_host=measured.ranks_per_host,
        device=Device(name=profile.processor[:100] or profile.device),
        levels=[level(measured)],
        software=Software(synchronous=profile.device == "cpu"),
        measured=[measured],
    )


def _check(profile: Profile, fitted: Calibration) -> float | None:
    """The model's error on the profiled step, in percent, over the links that the profile timed."""
    network = own_network(profile)
    if (network is None and profile.np > 1) or profile.step.step_ms.mean <= 0 or profile.published:
        return None
    seconds = step.period(fitted.case(network or LONE, profile.np, Settings())) + 1e-3 * profile.step.waiting_ms.mean
    return 100 * (1e3 * seconds / profile.step.step_ms.mean - 1)


def _compression(profile: Profile) -> CompressionSetting:
    """The compression in the profile's recipe; none if the simulator does not know the method.

    Raises RequestError for a value that no recipe can have.
    """
    recipe = profile.settings.get("compression", profile.compression)
    recipe = recipe if isinstance(recipe, dict) else {"method": profile.compression}
    known = {key: recipe[key] for key in CompressionSetting.model_fields if key in recipe}
    if isinstance(known.get("method"), str) and known["method"] not in METHODS:
        return CompressionSetting()
    try:
        return CompressionSetting.model_validate(known)
    except ValidationError as error:
        fault = explain(error, CompressionSetting, "method")[0]
        raise RequestError(f"the profile's settings.compression.{fault}") from None
