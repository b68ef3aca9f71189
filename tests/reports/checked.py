"""What hvdkit says of tasks before it trains them: `python checked.py MODULE KIND…` prints JSON, warnings by kind.

MODULE is one of the files beside this one. An error is a list of its one line.
"""

import importlib
import json
import sys
from pathlib import Path

from hvdkit.errors import HvdkitError
from hvdkit.recipe.schema import load
from hvdkit.worker.sanity_check import sanity_check
from hvdkit.worker.setup import RankScript, start


def said(adapter, kind):
    """The warnings for one task, or its error."""
    recipe = load(Path(__file__).with_name("reports.yaml"))
    try:
        setup = start(adapter, RankScript(kind.build, kind), recipe)
        session = setup.session(recipe, setup.strategy(recipe))
        warnings = sanity_check(session, setup.task, setup.dataset, recipe.batch_size, recipe.precision)
        return [*getattr(session.trainable, "warnings", []), *warnings]
    except HvdkitError as error:
        return [str(error)]
    except Exception as error:
        return [f"{type(error).__name__}: {error}"]


if __name__ == "__main__":
    module = importlib.import_module(sys.argv[1])
    print(json.dumps({kind: said(module.adapter, getattr(module, kind)) for kind in sys.argv[2:]}))
