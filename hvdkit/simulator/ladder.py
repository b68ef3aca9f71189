"""Which strategy? The ways to train a recipe on a cluster, by memory and time, in the order in which they are tried.

The order is that of Amazon SageMaker's "Introduction to distributed training concepts" and "Choosing a strategy": data
parallelism first; out of memory, a smaller batch, then what makes a sample need less (recomputed activations, lower
precision, smaller inputs); at the smallest batch, the model's state sharded over the data ranks (ZeRO), then the model
divided: Hugging Face's "Parallelism methods" and Narayanan et al. 2021, section 3 ("takeaways") say how, tensor
parallelism within a host only, pipelines across hosts, and no more of either than memory needs.

Every rung keeps the samples of an update: what a smaller batch lacks is accumulated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from hvdkit import tasks
from hvdkit.adapters.capabilities import CAPABILITIES, unsupported
from hvdkit.errors import RequestError
from hvdkit.recipe import schema
from hvdkit.recipe.communication import Parallel
from hvdkit.recipe.schema import GptModel, ImageFolder, Recipe, Synthetic
from hvdkit.results.ladder import Rung, RungName
from hvdkit.results.memory import Parts
from hvdkit.runtimes.pins import FRAMEWORKS
from hvdkit.simulator import memory, sharding
from hvdkit.tasks import few_samples

MOST_RANKS = 2**16
_LESS, _MOST_REMEDIES = 0.9, 4  # of what has not fitted
_HALVES = 4  # how often the size of an input is halved at most
_LEAST_SIDE = 32  # pixels
_LEAST_CONTEXT = 64  # tokens


class PredictedStep(NamedTuple):
    """An update, in milliseconds: expected, and the ends of its interval."""

    expected: float
    low: float
    high: float


@dataclass(frozen=True)
class Situation:
    """A recipe, the ranks that it is trained on, and what a rank may fill of its device; None: unknown.

    `half` is the 16-bit format in which the device computes, if it has one.
    """

    recipe: Recipe
    ranks: int
    ranks_per_host: int
    framework: str
    gpu: bool
    room: int | None
    half: str = "none"

    def needs(self, recipe: Recipe) -> Parts:
        """What the rank with the most keeps of a recipe."""
        ranks, shape = recipe.data_ranks(self.ranks), memory.sample_shape(recipe)
        return memory.parts(recipe, shape, self.framework, self.gpu, ranks, recipe.sharding)

    def cut(self, recipe: Recipe) -> list[int] | None:
        """A cut of the recipe's chain of blocks that fits, though not the fastest; None if there is none."""
        if self.room is None or recipe.parallel.pipeline == 1 or recipe.parallel.split != "auto":
            return None
        ranks, shape = recipe.data_ranks(self.ranks), memory.sample_shape(recipe)
        return memory.cut_within(recipe, shape, self.framework, self.gpu, ranks, self.room)

    def fits(self, parts: Parts) -> bool | None:
        """Whether the device has the memory; None if that is unknown."""
        return None if self.room is None else parts.total <= self.room

    def lacking(self, recipe: Recipe) -> str:
        """What the framework cannot train of a recipe on such a device, and which ones can; empty if it can."""
        device = "gpu" if self.gpu else "cpu"
        lines = {
            name: unsupported(name, able, recipe, device) for name, able in CAPABILITIES.items() if name in FRAMEWORKS
        }
        others = [name for name, faults in lines.items() if not faults]
        mine = "; ".join(line.partition("; expected")[0] for line in lines[self.framework])
        return f"{mine}; {', '.join(others)} can" if mine and others else mine


@dataclass(frozen=True)
class _Trial:
    """A recipe that fits, or that which needs the least of those that were tried."""

    recipe: Recipe
    parts: Parts
    fits: bool | None


_Keys = dict[str, Any]  # sections of a recipe that are other than in the recipe


def climb(
    situation: Situation, predicted: Callable[[Recipe], PredictedStep | None] = lambda recipe: None
) -> list[Rung]:
    """All rungs, each with what it needs, whether it fits, and why it was chosen or not.

    Chosen is the first that fits and is trained so here; a later one only if it is faster for sure (its interval ends
    before the other's begins), or if no earlier one is possible. What changes the result comes last. `predicted` gives
    a recipe's update; None where that is unknown.
    """
    rungs = [_rung(situation, name, trial, predicted) for name, trial in _tried(situation)]
    able = [rung for rung in rungs if rung.possible and not rung.changes_result]
    able = able or [rung for rung in rungs if rung.possible and rung.name == "precision"]
    able = able or [rung for rung in rungs if rung.fits and not rung.changes_result]
    first = able[0] if able else None
    surely = [rung for rung in able if rung.high_ms and first and first.low_ms and rung.high_ms < first.low_ms]
    chosen = min(surely, key=lambda rung: rung.step_ms or 0.0, default=first)
    for rung in rungs:
        rung.chosen = rung is chosen
        rung.why = _why(situation.recipe, rung, chosen)
    return rungs


def remedies(situation: Situation) -> str:
    """What needs less memory than the recipe does, which has not fitted, and keeps the result: keys, with the memory
    of each by the count of `hvdkit memory`. Empty where the model is not known.
    """
    needed = situation.needs(situation.recipe)
    if not needed.parameters:
        return ""
    most = round(_LESS * needed.total)
    tighter = replace(situation, room=most if situation.room is None else min(most, situation.room))
    rungs = [rung for rung in climb(tighter) if rung.fits and rung.supported and not rung.changes_result]
    alone = [rung for rung in rungs if rung.name == "smaller batch" or rung.batch_size == situation.recipe.batch_size]
    if not any(rung.name == "smaller batch" for rung in rungs):  # then it takes that and sharding, before stages
        alone = rungs
    listed = []
    for rung in (alone or rungs)[:_MOST_REMEDIES]:
        keys = " ".join(f"{key}={_text(value)}" for key, value in rung.changes.items())
        listed.append(f"{keys} ({_gib(rung.total_bytes or 0)} GiB)")
    least = f"a rank needs at least {_gib(needed.total)} GiB"
    if listed:
        return f"{least}; less takes {', or '.join(listed)}"
    if situation.room is None or situation.room > most:
        return least
    return f"{least}; no smaller batch, sharding or stages fit into the {_gib(situation.room)} GiB that it has here"


def trainable_ranks(recipe: Recipe, ranks: int, samples: int | None) -> int:
    """The ranks, or as many as a batch of each has samples for in an epoch of `samples`, if that is known."""
    if samples is None or recipe.batch_size * recipe.data_ranks(ranks) <= samples:
        return ranks
    return max(1, samples // recipe.batch_size) * recipe.parallel.model


def _tried(situation: Situation) -> Iterator[tuple[RungName, _Trial | str]]:
    """Each rung with the recipe that it comes to, or a line that says why there is none."""
    recipe, ranks = situation.recipe, situation.ranks
    whole: _Keys = {"parallel": Parallel().model_dump()} if recipe.parallel.divides else {}
    share = _share(situation, 1)
    sizes = [whole | size for size in _batches(recipe, share)] if isinstance(share, int) else []
    none = share if isinstance(share, str) else ""
    yield "as it is", _first(situation, [{}], "")
    yield "smaller batch", _first(situation, sizes if whole else sizes[1:], none or "the batch is one sample")
    again = "the recipe recomputes" if recipe.recompute else none
    yield "recompute", again or _first(situation, [size | {"recompute": True} for size in sizes], "")
    none_lower = ""
    if recipe.precision not in ("fp32", "fp64"):
        none_lower = f"the recipe is in {recipe.precision}"
    elif situation.half == "none":
        none_lower = "its devices are not known to compute in bf16 or fp16 (device.half_precision)"
    lower = [] if none_lower else [size | {"precision": situation.half} for size in sizes]
    yield "precision", _first(situation, _with_recompute(situation, lower), none or none_lower)
    inputs = [sizes[0] | smaller for smaller in _smaller_inputs(recipe)] if sizes else []
    yield "input size", _first(situation, inputs, none or "the size of its samples is not known, or the least")
    named: tuple[RungName, ...] = ("sharding: optimizer", "sharding: gradients", "sharding: parameters")
    for name, stage in zip(named, sharding.STAGES[1:], strict=True):
        shards = _with_recompute(situation, [size | {"sharding": stage} for size in sizes]) if ranks > 1 else []
        yield name, _first(situation, shards, none or "there is one rank")
    divisors = [size for size in range(2, ranks + 1) if ranks % size == 0]
    parts = [size for size in divisors if size <= situation.ranks_per_host]
    both = [(stages, size) for stages in divisors for size in parts if ranks % (stages * size) == 0]
    both.sort(key=lambda axes: (axes[0] * axes[1], -axes[1]))
    few = "there are too few ranks"
    yield "pipeline", _best((_on_mesh(situation, stages, 1) for stages in divisors), few)
    yield "tensor", _best((_on_mesh(situation, 1, size) for size in parts), few)
    yield "tensor and pipeline", _best((_on_mesh(situation, *axes) for axes in both), few)


def _on_mesh(situation: Situation, stages: int, size: int) -> _Trial | str:
    """The recipe on a mesh, with its own batch or a smaller one, at last with recomputed activations.

    A microbatch has the samples that a batch has elsewhere. There are as many as `parallel.microbatches: auto` may
    give.
    """
    recipe, axes, share = situation.recipe, Parallel(pipeline=stages, tensor=size), _share(situation, stages * size)
    if isinstance(share, str):
        return share
    try:
        tasks.choose(recipe).architecture(memory.sample_shape(recipe)).check_parallel(axes)
    except RequestError as error:
        return str(error).splitlines()[0]
    except NotImplementedError:
        return "only its script knows the model"
    keys: list[_Keys] = []
    for samples in _divisors(share, recipe.batch_size):
        pieces = share // samples
        counts = [n for n in range(min(4 * stages, pieces), stages - 1, -1) if pieces % n == 0] if stages > 1 else [1]
        for count in counts[:1]:
            mesh = axes.model_dump() | ({"microbatches": count} if stages > 1 else {})
            batch = {"batch_size": samples * count, "accumulate": pieces // count, "parallel": mesh}
            keys += [batch | {"sharding": stage} for stage in ("none", "optimizer")]
    if situation.room is not None and len(keys) > 2:  # most meshes fit in no way, which the smallest shows
        smallest = _first(situation, _with_recompute(situation, keys[-1:]), "")
        if isinstance(smallest, _Trial) and not smallest.fits:
            return smallest
    return _first(situation, _with_recompute(situation, keys), f"{share} samples are fewer than {stages} microbatches")


def _share(situation: Situation, model: int) -> int | str:
    """The samples of an update for each copy of the model, if `model` ranks have one; a line if they are not even."""
    recipe, copies = situation.recipe, situation.ranks // model
    samples = recipe.batch_size * recipe.accumulate * recipe.data_ranks(situation.ranks)
    if samples % copies:
        return f"an update's {samples} samples cannot be divided evenly among {copies} data ranks"
    return samples // copies


def _batches(recipe: Recipe, share: int) -> list[_Keys]:
    """The recipe's batch size and all smaller ones that make up `share` samples by accumulation."""
    return [{"batch_size": size, "accumulate": share // size} for size in _divisors(share, recipe.batch_size)]


def _divisors(number: int, most: int) -> list[int]:
    """Its divisors up to `most`, the largest first."""
    return [size for size in range(min(number, most), 0, -1) if number % size == 0]


def _with_recompute(situation: Situation, keys: Sequence[_Keys]) -> list[_Keys]:
    """The same, and after them the same with recomputed activations, if the framework has that."""
    if situation.recipe.recompute or "recompute" not in CAPABILITIES[situation.framework]:
        return list(keys)
    return [*keys, *(one | {"recompute": True} for one in keys)]


def _smaller_inputs(recipe: Recipe) -> Iterator[_Keys]:
    """A shorter context, or smaller images, halved again and again."""
    data, model = recipe.data, recipe.model
    for halves in range(1, _HALVES + 1):
        if isinstance(model, GptModel):
            table: Any = tasks.choose(recipe).architecture(None)
            sizes = {key: getattr(table, key) for key in ("layers", "heads", "width", "vocabulary")}
            if (shorter := table.context >> halves) >= _LEAST_CONTEXT:
                yield {"model": model.model_dump() | sizes | {"name": "gpt", "context": shorter}}
        elif isinstance(data, Synthetic):
            if min(data.height, data.width) >> halves >= _LEAST_SIDE:
                sides = {"height": data.height >> halves, "width": data.width >> halves}
                yield {"data": data.model_dump() | sides}
        elif isinstance(data, ImageFolder) and data.size != "auto" and (side := data.size >> halves) >= _LEAST_SIDE:
            yield {"data": data.model_dump() | {"size": side, "resize": "auto"}}


def _first(situation: Situation, keys: Iterable[_Keys], fault: str) -> _Trial | str:
    """The best trial of the recipe with each of these; without any `fault`."""
    return _best((_tried_with(situation, changes) for changes in keys), fault)


def _tried_with(situation: Situation, changes: _Keys) -> _Trial | str:
    """The recipe with these keys, or why it is refused."""
    try:
        recipe = schema.revise(situation.recipe.model_dump() | changes, situation.recipe.name)
    except RequestError as error:
        return str(error).splitlines()[0].partition(": ")[2]
    parts = situation.needs(recipe)
    fits = situation.fits(parts)
    if fits is False and (split := situation.cut(recipe)):
        recipe = schema.revise(recipe.model_dump(), recipe.name, [f"parallel.split={split}"])
        parts, fits = situation.needs(recipe), True
    return _Trial(recipe, parts, fits)


def _best(trials: Iterable[_Trial | str], fault: str) -> _Trial | str:
    """The first that fits, as far as that is known, or else that which needs the least; without any the first line."""
    least, refused = None, ""
    for trial in trials:
        if isinstance(trial, str):
            refused = refused or trial
        elif trial.fits is not False:
            return trial
        elif least is None or trial.parts.total < least.parts.total:
            least = trial
    return least or refused or fault


def _rung(
    situation: Situation, name: RungName, trial: _Trial | str, predicted: Callable[[Recipe], PredictedStep | None]
) -> Rung:
    recipe = situation.recipe if isinstance(trial, str) else trial.recipe
    data = recipe.data_ranks(situation.ranks)
    rung = Rung(
        name=name,
        changes={},
        batch_size=recipe.batch_size,
        accumulate=recipe.accumulate,
        data_ranks=data,
        parts=None,
        total_bytes=None,
        fits=None,
        supported=False,
        changes_result=name in ("precision", "input size"),
    )
    if isinstance(trial, str):
        return rung.model_copy(update={"why": trial})
    before, lacking = schema.flat(situation.recipe), situation.lacking(recipe)
    step = predicted(recipe) if trial.fits is not False else None
    changes = {key: value for key, value in schema.flat(recipe).items() if before.get(key) != value}
    known: dict[str, Any] = {"changes": changes, "parts": trial.parts, "total_bytes": trial.parts.total}
    known |= {"fits": trial.fits, "supported": not lacking, "why": lacking}
    if step:
        rate = 1e3 * recipe.batch_size * recipe.accumulate * data / step.expected
        known |= {"step_ms": step.expected, "low_ms": step.low, "high_ms": step.high, "samples_per_second": rate}
    return rung.model_copy(update=known)


def _why(recipe: Recipe, rung: Rung, chosen: Rung | None) -> str:
    """Why a rung was chosen, or why not."""
    if rung.parts is None:
        return rung.why
    if rung.fits is False:
        largest = sorted(((value or 0, name) for name, value in rung.parts), reverse=True)[:2]
        return "does not fit: " + ", ".join(f"{name} {_gib(value)} GiB" for value, name in largest)
    lacking = [] if rung.supported else [rung.why]
    if rung is chosen:
        fits = "fits" if rung.fits else "whether it fits is unknown"
        parts = rung.changes.get("parallel.microbatches", 1)  # auto where a pipeline's recipe becomes a whole model's
        at_once = rung.batch_size // (1 if parts == "auto" else parts)
        norms = few_samples.warning(recipe.model.name, recipe.model.batch_norm, at_once, rung.data_ranks)
        return "; ".join([f"chosen: {fits}", *lacking, *norms])
    fits = "fits, and" if rung.fits else "whether it fits is unknown; it"
    if rung.changes_result:
        return "; ".join([f"{fits} changes what is trained: yours to decide", *lacking])
    return "; ".join(lacking or [f"{fits} {_against(rung, chosen)}"])


def _against(rung: Rung, chosen: Rung | None) -> str:
    """How it compares with the chosen one."""
    assert chosen
    if not rung.low_ms or not chosen.high_ms:
        return f"is not needed: {chosen.name} {'fits' if chosen.fits else 'comes first'}"
    return f"is {'slower' if rung.low_ms > chosen.high_ms else 'not faster for sure'} than {chosen.name}"


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _gib(count: int) -> str:
    return f"{count / 2**30:,.2f}" if count < 2**30 else f"{count / 2**30:,.1f}"
