"""What bench/counted.py finds in machine code, and what bench/modelled.py makes of counters."""

from __future__ import annotations

import pytest

pytest.importorskip("torch_attnkit.sim._ptx", reason="needs the PTX simulator's extension")

from bench import counted, modelled
from torch_attnkit.sim.ptx import Launch, counters

CODE = """
.L_x_1:
        /*0010*/                   HMMA.16816.F32.BF16 R4, R8, R12, R4 ;
        /*0020*/              @!P0 BRA `(.L_x_2) ;
        /*0030*/                   FMUL R4, R4, R5 ;
.L_x_2:
        /*0040*/               @P1 BRA `(.L_x_1) ;
.L_x_3:
        /*0050*/                   IADD R1, R1, 0x1 ;
        /*0060*/               @P1 BRA `(.L_x_3) ;
"""


def test_loops_with_products_are_found_by_their_backward_branches():
    assert counted.loops(CODE) == [counted.Loop(instructions=4, products=1)]


def test_a_launch_takes_as_long_as_its_busiest_resource():
    counts = dict.fromkeys(
        ("global_read", "global_written", "tma_read", "tma_written", "shared_wavefronts", "instructions"), 0
    )
    counts |= {"by_class": {}, "flops": {}, "cp_async": 1000, "global_sectors": 500}
    launch = Launch("kernel", "sm_120f", (4, 1, 1), (32, 1, 1), (1, 1, 1), 0, counts)
    chip = counters.CHIPS["sm_120f"]
    assert modelled.least(launch, chip) == (17000 / (chip.memory * 1e6), "memory")
    counts["instructions"] = 4 * 4 * 100_000  # of four schedulers on each of four multiprocessors
    least, what = modelled.least(launch, chip)
    assert what == "issue slots" and least == pytest.approx(100_000 / (chip.ghz * 1e3))


def test_a_step_moves_what_the_model_has():
    found = {(s.op, s.kind): s for s in modelled.steps(keys=256)}
    assert sum(s.times for s in found.values() if s.op == "sdpa_decode") == modelled.LAYERS
    bytes_of = lambda kind: found["sdpa_decode", kind].nbytes - 2 * 64 * 64 * 2 - 64 * 4
    assert bytes_of("all keys") == 2 * 256 * 8 * 64 * 2 and bytes_of("window 128") == bytes_of("all keys") // 2
