"""tensormap.replace and tensormap.cp_fenceproxy (PTX ISA 9.7.9.28, 9.7.13.16), and clusterlaunchcontrol (9.7.13.17)."""

import numpy as np
import pytest
from torch_attnkit.sim._ptx import PtxError

from torch_attnkit.sim import _ptx as machine

from .async_pieces import CLUSTER, HEAD, INIT, aligned, expect, move, wait
from .snippet import run

pytestmark = pytest.mark.simulator
SEEDS = [0, 1, 2, 3]
FENCE = "global.shared::cta.tensormap::generic.release.gpu.sync.aligned"


def encoded(array, data_type, sizes, strides, box, steps=None, **options):
    out = aligned(128)
    code = machine.tensor_map_encode(
        data_type, array.ctypes.data, sizes, strides, box, steps or [1] * len(sizes), **options
    )
    out[:] = np.frombuffer(code, np.uint8)
    return out


@pytest.mark.parametrize("space", ["global", ""])
def test_every_field_in_global_memory(space):
    memory, other = aligned(4096), aligned(4096)
    descriptor = encoded(memory, 0, [64], [], [64])
    dot = f".{space}" if space else ""
    body = (
        HEAD
        + f"""
        @!%p0 ret;
        tensormap.replace.tile.rank{dot}.b1024.b32 [%in0], 2;
        tensormap.replace.tile.global_address{dot}.b1024.b64 [%in0], %in1;
        tensormap.replace.tile.box_dim{dot}.b1024.b32 [%in0], 0, 8;
        tensormap.replace.tile.box_dim{dot}.b1024.b32 [%in0], 1, 4;
        tensormap.replace.tile.box_dim{dot}.b1024.b32 [%in0], 2, 3;
        tensormap.replace.tile.global_dim{dot}.b1024.b32 [%in0], 0, 16;
        tensormap.replace.tile.global_dim{dot}.b1024.b32 [%in0], 1, 11;
        tensormap.replace.tile.global_dim{dot}.b1024.b32 [%in0], 2, 5;
        mov.u64 %d1, 80;
        mov.u64 %d2, 880;
        tensormap.replace.tile.global_stride{dot}.b1024.b64 [%in0], 0, %d1;
        tensormap.replace.tile.global_stride{dot}.b1024.b64 [%in0], 1, %d2;
        tensormap.replace.tile.element_stride{dot}.b1024.b32 [%in0], 1, 2;
        tensormap.replace.tile.elemtype{dot}.b1024.b32 [%in0], 7;
        tensormap.replace.tile.interleave_layout{dot}.b1024.b32 [%in0], 0;
        tensormap.replace.tile.swizzle_mode{dot}.b1024.b32 [%in0], 3;
        tensormap.replace.tile.swizzle_atomicity{dot}.b1024.b32 [%in0], 1;
        tensormap.replace.tile.fill_mode{dot}.b1024.b32 [%in0], 1;
        """
    )
    run(body, descriptor, other)
    fields = machine.tensor_map_decode(descriptor.tobytes())
    assert fields == {
        "address": other.ctypes.data, "element": "f32", "interleave": 0, "swizzle": 128, "atomicity": 1, "promotion": 0,
        "fill": "nan", "sizes": [16, 11, 5], "strides": [80, 880], "box": [8, 4, 3], "steps": [1, 2, 1], "invalid": "",
    }  # fmt: skip


ELEMENTS = "u8 u16 u32 s32 u64 s64 f16 f32 f32.ftz f64 bf16 tf32 tf32.ftz b4x16 b4x16_p64 b6x16_p32".split()


@pytest.mark.parametrize("number", range(16))
def test_element_types(number):
    descriptor = encoded(aligned(4096), 0, [128], [], [128])
    run(HEAD + f"@%p0 tensormap.replace.tile.elemtype.global.b1024.b32 [%in0], {number};", descriptor)
    assert machine.tensor_map_decode(descriptor.tobytes())["element"] == ELEMENTS[number]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_map_made_in_shared_memory_is_used(seed):
    # The way of grouped kernels: fetch a map, change it in shared memory, publish it, load through it.
    memory, other = aligned((8, 64)), aligned((8, 64))
    other[...] = np.random.default_rng(1).integers(0, 256, other.shape)
    template, published, out = encoded(memory, 0, [64, 8], [64], [32, 4]), aligned(128), aligned((4, 32))
    body = HEAD + INIT + move("IN", 128, "%in0", out=False, offset=4096) + """
        mov.u32 %r1, data;
        cvt.u64.u32 %d1, %r1;
        @%p0 tensormap.replace.tile.global_address.shared::cta.b1024.b64 [data+4096], %in1;
        @%p0 tensormap.replace.tile.global_dim.shared::cta.b1024.b32 [%d1+4096], 1, 6;
        bar.warp.sync 0xffffffff;
        tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned
            [%in2], [data+4096], 128;
        fence.proxy.tensormap::generic.acquire.gpu [%in2], 128;
        """ + expect(128) + """
        @%p0 cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes [data], [%in2, {32, 4}], [mb];
        """ + wait("W") + move("OUT", 128, "%in3", out=True)  # fmt: skip
    run(body, template, other, published, out, memory, seed=seed)
    want = np.zeros((4, 32), np.uint8)
    want[:2] = other[4:6, 32:]
    assert (out == want).all()


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ("tensormap.replace.tile.box_dim.global.b1024.b32 [%in0], 0, 257;", "box size 257"),
        ("tensormap.replace.tile.element_stride.global.b1024.b32 [%in0], 0, 9;", "element stride 9"),
        ("tensormap.replace.tile.global_stride.global.b1024.b64 [%in0], 0, 24;", "no multiple of 16"),
        ("tensormap.replace.tile.global_stride.global.b1024.b64 [%in0], 4, 32;", "constant up to 3"),
        ("tensormap.replace.tile.global_address.global.b1024.b32 [%in0], %r0;", "are .b64"),
        ("tensormap.replace.tile.swizzle_mode.global.b1024.b32 [%in0], 4;", "4 is not supported"),
        ("tensormap.replace.tile.fill_mode.global.b1024.b32 [%in0], %r0;", "has to be a constant"),
        ("tensormap.replace.tile.colour.global.b1024.b32 [%in0], 1;", "no field"),
        ("tensormap.replace.tile.rank.global.b1024.b32 [%in0+32], 1;", "not aligned to 64"),
        ("tensormap.replace.tile.rank.global.b1024.b32 [%in0+128], 1;", "128 bytes at global address"),
        (
            f"tensormap.cp_fenceproxy.{FENCE} [%in0], [data], 64;",
            "128",
        ),
    ],
)
def test_misuse(form, message):
    with pytest.raises(PtxError, match=message):
        run(HEAD + form, aligned(128))


# --- clusterlaunchcontrol

# Every cluster marks its own CTAs' tiles, then takes over clusters that have not started until there are none.
STEAL = """
    mov.u32 %r1, %ctaid.x;
    mov.u32 %r2, %ctaid.y;
    mov.u32 %r10, 0;                      // parity
    mov.u32 %r11, %cluster_ctarank;
    setp.eq.u32 %p1, %r11, 0;
    and.pred %p1, %p1, %p0;
    sub.u32 %r1, %r1, %r11;               // the cluster's first CTA
    AGAIN:
    {expect}
    barrier.cluster.arrive; barrier.cluster.wait;
    @%p{who} clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes{multicast}.b128
        [data], [mb];
    mov.u32 %r3, %nctaid.x;
    add.u32 %r4, %r1, %r11;
    mad.lo.u32 %r5, %r2, %r3, %r4;
    mad.wide.u32 %d1, %r5, 4, %in0;
    @%p0 red.global.add.u32 [%d1], 1;
    WAIT: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %p2, [mb], %r10;
    @!%p2 bra WAIT;
    xor.b32 %r10, %r10, 1;
    ld.shared.b128 %q0, [data];
    clusterlaunchcontrol.query_cancel.is_canceled.pred.b128 %p3, %q0;
    @!%p3 bra END;
    clusterlaunchcontrol.query_cancel.get_first_ctaid.v4.b32.b128 {{%r1, %r2, %r6, _}}, %q0;
    clusterlaunchcontrol.query_cancel.get_first_ctaid::x.b32.b128 %r7, %q0;
    clusterlaunchcontrol.query_cancel.get_first_ctaid::y.b32.b128 %r8, %q0;
    clusterlaunchcontrol.query_cancel.get_first_ctaid::z.b32.b128 %r9, %q0;
    setp.ne.u32 %p4, %r1, %r7;
    setp.ne.or.u32 %p4, %r2, %r8, %p4;
    setp.ne.or.u32 %p4, %r6, %r9, %p4;
    @%p4 trap;
    fence.proxy.async.shared::cta;
    bra AGAIN;
    END: barrier.cluster.arrive; barrier.cluster.wait;
    """


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("cluster", [1, 2])
def test_every_tile_is_worked_on_once(cluster, seed, threads):
    out = aligned((3, 8), np.uint32)
    body = STEAL.format(
        expect=expect(16), who=1 if cluster > 1 else 0, multicast=".multicast::cluster::all" if cluster > 1 else ""
    )
    run(HEAD + INIT + CLUSTER + body, out, grid=(8, 3), cluster=cluster, seed=seed, threads=threads)
    assert (out == 1).all()


def test_one_worker_takes_everything():
    # With one OS thread and no seed the first cluster finds all others waiting: the atomics come from one CTA.
    out = aligned(8, np.uint32)
    body = STEAL.format(expect=expect(16), who=0, multicast="") + "@%p0 red.global.add.u32 [%in1], 1;"
    count = aligned(1, np.uint32)
    run(HEAD + INIT + body, out, count, grid=8, threads=1)
    assert (out == 1).all()
    assert count[0] == 1


@pytest.mark.parametrize(
    "form",
    [
        "clusterlaunchcontrol.try_cancel.async.shared::cta.b128 [data], [mb];",
        "clusterlaunchcontrol.query_cancel.get_first_ctaid.b32.b128 %r0, %q0;",
        "clusterlaunchcontrol.query_cancel.is_canceled.b128 %p1, %q0;",
    ],
)
def test_forms_that_do_not_exist(form):
    with pytest.raises(PtxError, match="line"):
        run(HEAD + form)
