"""When a forward pass needs which parameters, for updates that wait until then (`core.trainable.Hooks.on_use`)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from torch import nn


def watch_uses(
    model: nn.Module, parameters: Mapping[str, nn.Parameter], use: Callable[[Collection[str]], None]
) -> None:
    """Call `use` before modules are called, with the names of their own parameters.

    A module may use the parameters of one that is not called, as a GPT's output does with its table of tokens. So what
    was not called in the first forward pass of training is needed at the start of each. One that uses another's
    before it is called in the same pass is not foreseen; where autograd has kept them, backward then says so.
    """
    names = {id(parameter): name for name, parameter in parameters.items()}
    by_module = {
        module: [names[id(parameter)] for parameter in module._parameters.values() if id(parameter) in names]
        for module in model.modules()
    }
    called: set[str] = set()
    uncalled: set[str] = set(parameters)

    def start(module: nn.Module, inputs: object) -> None:
        use(uncalled)

    def before(module: nn.Module, inputs: object) -> None:
        called.update(by_module[module])
        use(by_module[module])

    def end(module: nn.Module, inputs: object, outputs: object) -> None:
        if module.training:
            uncalled.intersection_update(uncalled - called)
        use(parameters)

    model.register_forward_pre_hook(start)
    for module, own in by_module.items():
        if own:
            module.register_forward_pre_hook(before)
    model.register_forward_hook(end)
