"""A ResNet as an ONNX graph, made from its table by `onnx.helper`, without a framework."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from hvdkit.tasks.resnet import Conv, ResNet
from hvdkit.tasks.task import state_shapes

# Both of 2021: ONNX Runtime since 1.11 and other readers of that time know them.
OPSET, IR = 15, 8


def model(table: ResNet, state: Mapping[str, np.ndarray], metadata: Mapping[str, str]) -> bytes:
    """The file's content: images (n, channels, height, width) to logits (n, classes), both float32.

    `state` has the table's `state_shapes`; tensors keep their names. n, height and width may be any.
    """
    nodes: list[onnx.NodeProto] = []

    def add(operator: str, name: str, *inputs: str, **attributes: Any) -> str:
        nodes.append(helper.make_node(operator, list(inputs), [name], name, **attributes))
        return name

    def normalized(prefix: str, row: Conv, x: str) -> str:
        conv, norm = prefix + row.name, prefix + row.norm
        size, pads = [row.kernel] * 2, [row.padding] * 4
        y = add("Conv", conv, x, f"{conv}.weight", kernel_shape=size, strides=[row.stride] * 2, pads=pads)
        parameters = (f"{norm}.{name}" for name in ("weight", "bias", "running_mean", "running_var"))
        return add("BatchNormalization", norm, y, *parameters, epsilon=table.norm_epsilon)

    x = add("Relu", "relu", normalized("", table.stem, "images"))
    if table.max_pool:
        x = add("MaxPool", "maxpool", x, kernel_shape=[3, 3], strides=[2, 2], pads=[1] * 4)
    for block in table.blocks:
        prefix, y = f"{block.name}.", x
        for index, conv in enumerate(block.convs, start=1):
            y = normalized(prefix, conv, y)
            if index < len(block.convs):
                y = add("Relu", f"{prefix}relu{index}", y)
        shortcut = normalized(prefix, block.projection, x) if block.projection else x
        x = add("Relu", f"{prefix}relu", add("Add", f"{prefix}add", y, shortcut))
    x = add("Flatten", "flatten", add("GlobalAveragePool", "avgpool", x))
    add("Gemm", "logits", x, "fc.weight", "fc.bias", transB=1)

    graph = helper.make_graph(
        nodes,
        table.name,
        [helper.make_tensor_value_info("images", TensorProto.FLOAT, ["n", table.stem.inputs, "height", "width"])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["n", table.classes])],
        [numpy_helper.from_array(state[name].astype(np.float32), name) for name in state_shapes(table)],
    )
    proto = helper.make_model(
        graph, producer_name="hvdkit", ir_version=IR, opset_imports=[helper.make_opsetid("", OPSET)]
    )
    helper.set_model_props(proto, dict(metadata))
    onnx.checker.check_model(proto, full_check=True)
    return bytes(proto.SerializeToString())
