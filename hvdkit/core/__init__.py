"""The training step and what it needs, the same for every framework and strategy. In the order to read:

1. `step.py`: one update, from top to bottom. `session.py` makes its parts, `stateful.py` reads and loads them.
2. `strategy.py`: how gradients are averaged over ranks (`hvdkit/strategies/`); `group.py`: over which ranks.
3. `update.py`, `update_rules.py`: unscale, clip, the optimizers' rules. `precision.py`: dtypes, loss scaling.
4. `pieces.py`: what of each tensor a rank has. `state.py`: names and layouts in checkpoints.
5. `seam.py`, `tensors.py`, `trainable.py`: what an adapter provides.
6. `loop.py`, `step_plan.py`, `schedule.py`, `metrics.py`: a run around the steps.

Few runs need the rest: `averaged_weights.py` (EMA and SWA), `counting.py` (losses that return (sum, count)),
`trace_events.py` (`hvdkit profile`).
"""
