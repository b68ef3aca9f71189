"""Other ways to train a recipe, behind the same seam, so that they have hvdkit's network, data, loop and clock.

One module a framework; its `RIVALS` maps the names of `hvdkit.baselines.registry` to subclasses of `base.Rival`.
"""
