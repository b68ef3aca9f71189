"""The dtypes of each `precision`, and dynamic loss scaling for float16."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Precision:
    """`parameters` is the dtype of weights, gradients, buffers and slots; `compute` of convolutions and activations.

    Both are NumPy's names. Batch-norm statistics, the last layer and the loss stay in the dtype of the parameters.
    """

    parameters: str
    compute: str

    @property
    def scales_loss(self) -> bool:
        """Whether the loss is scaled, so that gradients do not underflow."""
        return self.compute == "float16"


PRECISIONS = {
    "fp32": Precision("float32", "float32"),
    "fp64": Precision("float64", "float64"),
    "bf16": Precision("float32", "bfloat16"),
    "fp16": Precision("float32", "float16"),
}


@dataclass(frozen=True)
class LossScaling:
    """Dynamic loss scaling (Micikevicius et al. 2018, section 3.2), with the constants of PyTorch's GradScaler.

    Scaled gradients are reduced first and then checked: an infinity on one rank reaches every rank through the sum, so
    all ranks skip the same step and change their scale in the same way.
    """

    initial: float = 2.0**16
    growth: float = 2.0
    backoff: float = 0.5
    interval: int = 2000  # steps without overflow before the scale grows


LOSS_SCALING = LossScaling()
