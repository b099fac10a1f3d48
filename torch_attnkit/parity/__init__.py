"""Do the kernels compute what their reference defines? Every row of the table, on hardware or in a simulator.

The cases come from the table: row x dtype x dims x features x the shapes of the op's ``cases.py``, and extra ones
(``case.py``); in a simulator few of them, in which every two of these meet (``covering.py``). A case calls the op as a
user would, with outputs poisoned and fenced by guard bands and inputs embedded in poisoned buffers (``guard.py``), and
compares with the reference run in float64 (``judge.py``, ``oracle/compare.py``).
"""

from .case import Case, accepted, all_features, arguments, bound, cases, feature_sets, generate, inputs, shapes
from .guard import LAYOUTS, Fence, embed, guarded_outputs, poison
from .judge import arithmetic_of, mutated, outcome, reference_of, run, unchanged, workers
from .shapes_only import ShapesOnly, materialised

__all__ = [
    "LAYOUTS", "Case", "Fence", "ShapesOnly", "accepted", "all_features", "arguments", "arithmetic_of", "bound",
    "cases", "embed", "feature_sets", "generate", "guarded_outputs", "inputs", "materialised", "mutated", "outcome",
    "poison", "reference_of", "run", "shapes", "unchanged", "workers",
]  # fmt: skip
