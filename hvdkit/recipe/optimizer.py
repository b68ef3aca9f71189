"""The recipe's `optimizer` section, the keys of each optimizer; averages of the weights; when training stops early.

`hvdkit/recipe/schema.py` has the other sections.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, model_validator

from hvdkit.recipe.data import Strict

_WEIGHT_DECAY = "factor of the weights themselves in each update"
_MOMENTUM = "share of the last velocity that is kept"


class Optimizer(Strict):
    """Base of all optimizers; the recipe's `optimizer.name` chooses one of the classes below.

    `learning_rate` is for a global batch of `schedule.base_batch_size` samples. Weight decay applies to all parameters
    or, with `decay: weights`, to all but biases and those of norms. Formulas: `hvdkit/core/update_rules.py`.
    """

    name: str
    learning_rate: float = Field(gt=0, le=1e6, description="of a global batch of schedule.base_batch_size samples")
    weight_decay: float = Field(1e-4, ge=0, description=_WEIGHT_DECAY)
    decay: Literal["all", "weights"] = Field("all", description="weights: all but biases and norms decay")
    clip_norm: float | None = Field(None, gt=0, description="largest Euclidean norm of all gradients together")


class Sgd(Optimizer):
    """Stochastic gradient descent with momentum, as in PyTorch: the learning rate is not part of the velocity.

    Weight decay is added to the gradient (coupled) or, with `decoupled`, subtracted from the weights.
    """

    name: Literal["sgd"] = "sgd"
    momentum: float = Field(0.9, ge=0, lt=1, description=_MOMENTUM)
    nesterov: bool = Field(False, description="Nesterov's momentum")
    decoupled: bool = Field(False, description="subtract weight decay from the weights, not through the gradient")

    @model_validator(mode="after")
    def _nesterov_needs_momentum(self) -> Sgd:
        if self.nesterov and self.momentum == 0:
            raise ValueError("expected momentum > 0 where nesterov is true, got momentum 0")
        return self


class _Adam(Optimizer):
    weight_decay: float = Field(1e-2, ge=0, description=_WEIGHT_DECAY)
    beta1: float = Field(0.9, ge=0, lt=1, description="decay of the mean of gradients")
    beta2: float = Field(0.999, ge=0, lt=1, description="decay of the mean of their squares")
    epsilon: float = Field(1e-8, gt=0, description="added to the root of the mean square")


class AdamW(_Adam):
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019)."""

    name: Literal["adamw"] = "adamw"


class Lamb(_Adam):
    """Adam with a learning rate per layer (You et al. 2020). Parameters exempt from decay use the global rate."""

    name: Literal["lamb"] = "lamb"
    epsilon: float = Field(1e-6, gt=0, description="added to the root of the mean square")


class Lars(Optimizer):
    """SGD with a learning rate per layer (You et al. 2017). Parameters exempt from decay use the global rate."""

    name: Literal["lars"] = "lars"
    momentum: float = Field(0.9, ge=0, lt=1, description=_MOMENTUM)
    trust_coefficient: float = Field(1e-3, gt=0, description="factor of a layer's learning rate")


def _named(value: Any) -> Any:
    """A mapping that names no optimizer is of `sgd`."""
    return {"name": "sgd"} | value if isinstance(value, dict) else value


AnyOptimizer = Annotated[Sgd | AdamW | Lars | Lamb, Discriminator("name"), BeforeValidator(_named)]


class AverageWeights(Strict):
    """An average of the weights, evaluated and saved beside them: exponential with `decay`, or with `from_epoch` equal
    over the ends of epochs from that one on (SWA).

    Formulas: `hvdkit/core/averaged_weights.py`.
    """

    decay: float | None = Field(None, gt=0, lt=1, description="share of the average that each update keeps")
    from_epoch: int | None = Field(None, ge=1, description="first epoch, counted from 1, whose last weights count")

    @model_validator(mode="after")
    def _one_of_both(self) -> AverageWeights:
        if (self.decay is None) == (self.from_epoch is None):
            raise ValueError(
                "expected either decay, such as {decay: 0.999}, or from_epoch, such as {from_epoch: 15}, got "
                + ("neither" if self.decay is None else "both")
            )
        return self


class EarlyStopping(Strict):
    """Training ends after the first epoch at whose end `metric` has not improved by more than `min_delta` for
    `patience` epochs.

    The learning rate follows its schedule for all of the recipe's epochs.
    """

    metric: str | None = Field(
        None, min_length=1, description="validation metric, with a minus sign if lower is better; null: the task's own"
    )
    patience: int = Field(ge=1, le=100_000, description="epochs without improvement after which training ends")
    min_delta: float = Field(0.0, ge=0, description="an improvement is larger than this")


class Loss(Strict):
    """Softmax cross-entropy, averaged over the targets of all batches of an update on all ranks.

    `label_smoothing` is the share distributed evenly over all classes (Szegedy et al. 2016, section 7). Targets that
    are the `ignored_label` do not count. With `class_weights` w the average is Σ w_y l_y / Σ w_y over the targets y.
    The validation's loss has neither smoothing nor weights.
    """

    label_smoothing: float = Field(0.0, ge=0, lt=1, description="share distributed evenly over all classes")
    ignored_label: int | None = Field(
        None, ge=-(2**31), lt=2**31, description="targets that do not count, such as a padding token; null: all do"
    )
    class_weights: list[Annotated[float, Field(ge=0, le=1e6)]] | None = Field(
        None, min_length=2, description="weight of each class in the training loss; null: all weigh 1"
    )

    @model_validator(mode="after")
    def _a_class_weighs_something(self) -> Loss:
        if self.class_weights is not None and not any(self.class_weights):
            raise ValueError("expected a class_weights above 0, got none")
        return self

    @property
    def counts(self) -> bool:
        """Whether targets count differently, so that a batch's loss is a sum and a count."""
        return self.ignored_label is not None or self.class_weights is not None
