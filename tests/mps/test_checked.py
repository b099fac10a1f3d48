"""The covering parity cases of every Metal row once more, in the simulator's strictest mode.

``tests/test_parity.py`` runs them as fast as it can, where only a wrong result or a fault shows. Here every access is
looked at: bounds, alignment, races between threads and threadgroups, reads of what nobody wrote, barriers and
collectives that a part of the threads does not reach.
"""

from __future__ import annotations

import pytest

from torch_attnkit import parity
from torch_attnkit.core.support import support
from torch_attnkit.sim import metal

pytestmark = pytest.mark.simulator
CASES = [c for op, index, _, arch in support("metal") for c in parity.cases(op, index, arch, covering=True)]


@pytest.mark.parametrize(("number", "case"), list(enumerate(CASES)), ids=[c.id for c in CASES])
def test_nothing_but_right_results(number: int, case: parity.Case):
    with metal.settings(mode="checked", strict=True):
        parity.run(case, layout=parity.LAYOUTS[(number + 1) % 2])  # the layout that the fast run does not take
