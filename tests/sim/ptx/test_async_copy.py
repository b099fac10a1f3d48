"""cp.async and cp.async.bulk (PTX ISA 9.7.9.25), st.async and red.async: every form, and what waits for them."""

import ml_dtypes
import numpy as np
import pytest
from torch_attnkit.sim._ptx import PtxError

from .async_pieces import CLUSTER, HEAD, INIT, aligned, expect, move, wait
from .snippet import run

pytestmark = pytest.mark.simulator
SEEDS = [0, 1, 2, 3, 4, 5]
PROXY = "fence.proxy.async.shared::cta; bar.sync 0;\n"
COMMIT = "cp.async.bulk.commit_group;\n"
BYTES = "mbarrier::complete_tx::bytes"


def random_array(n, dtype=np.uint8, seed=0):
    out = aligned(n, dtype)
    out[...] = np.random.default_rng(seed).integers(0, 200, n)
    return out


# --- cp.async


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("cache", "size"), [("ca", 4), ("ca", 8), ("ca", 16), ("cg", 16)])
def test_cp_async(cache, size, seed):
    source, out = random_array(32 * size), aligned(32 * size)
    body = f"""
        mul.lo.u32 %r1, %r0, {size};
        cvt.u64.u32 %d0, %r1;
        add.u64 %d0, %d0, %in0;
        mov.u32 %r2, data;
        add.u32 %r2, %r2, %r1;
        cp.async.{cache}.shared.global{".L2::128B" if size == 16 else ""} [%r2], [%d0], {size};
        cp.async.commit_group;
        cp.async.wait_group 0;
        bar.sync 0;
        """
    run(HEAD + body + move("OUT", 32 * size, "%in1", out=True), source, out, seed=seed)
    assert (out == source).all()


@pytest.mark.parametrize("size", [4, 8, 16])
def test_cp_async_fills_with_zeros(size):
    # Lane l copies l % (size + 1) bytes; a lane that reads nothing may have any address.
    source, out = random_array(32 * size), aligned(32 * size)
    body = f"""
        mul.lo.u32 %r1, %r0, {size};
        rem.u32 %r3, %r0, {size + 1};
        cvt.u64.u32 %d0, %r1;
        add.u64 %d0, %d0, %in0;
        setp.eq.u32 %p1, %r3, 0;
        selp.b64 %d0, 0, %d0, %p1;
        mov.u32 %r2, data;
        add.u32 %r2, %r2, %r1;
        cp.async.ca.shared::cta.global [%r2], [%d0], {size}, %r3;
        cp.async.wait_all;
        bar.sync 0;
        """
    run(HEAD + body + move("OUT", 32 * size, "%in1", out=True), source, out)
    want = source.reshape(32, size).copy()
    for lane in range(32):
        want[lane, lane % (size + 1) :] = 0
    assert (out.reshape(32, size) == want).all()


@pytest.mark.parametrize("negated", ["", "!"])
def test_cp_async_ignores_the_source(negated):
    source, out = random_array(32 * 16), aligned(32 * 16)
    body = f"""
        mul.lo.u32 %r1, %r0, 16;
        cvt.u64.u32 %d0, %r1;
        add.u64 %d0, %d0, %in0;
        and.b32 %r3, %r0, 1;
        setp.eq.u32 %p1, %r3, 1;
        mov.u32 %r2, data;
        add.u32 %r2, %r2, %r1;
        createpolicy.fractional.L2::evict_last.b64 %d1, 1.0;
        cp.async.cg.shared.global.L2::cache_hint [%r2], [%d0], 16, {negated}%p1, %d1;
        cp.async.wait_all;
        bar.sync 0;
        """
    run(HEAD + body + move("OUT", 512, "%in1", out=True), source, out)
    want = source.reshape(32, 16).copy()
    want[(0 if negated else 1) :: 2] = 0
    assert (out.reshape(32, 16) == want).all()


GROUPS = """
    mul.lo.u32 %r1, %r0, 16;
    cvt.u64.u32 %d0, %r1;
    add.u64 %d0, %d0, %in0;
    mov.u32 %r2, data;
    add.u32 %r2, %r2, %r1;
    cp.async.cg.shared.global [%r2], [%d0], 16;
    cp.async.commit_group;
    cp.async.cg.shared.global [%r2+512], [%d0+512], 16;
    cp.async.commit_group;
    cp.async.cg.shared.global [%r2+1024], [%d0+1024], 16;
    cp.async.commit_group;
    """


@pytest.mark.parametrize("groups", [0, 1, 2, 3])
def test_wait_group_leaves_the_newest_pending(groups):
    # What was waited for is there under every schedule; what was not is missing under some.
    source = random_array(1536)
    complete = np.zeros((3,), bool)
    complete[: 3 - groups] = True
    missing = np.zeros(3, bool)
    for seed in SEEDS[1:] + list(range(6, 30)):
        out = aligned(1536)
        body = GROUPS + f"cp.async.wait_group {groups}; bar.sync 0;"
        run(HEAD + body + move("OUT", 1536, "%in1", out=True), source, out, seed=seed)
        same = (out.reshape(3, -1) == source.reshape(3, -1)).all(1)
        assert same[complete].all()
        missing |= ~same
    assert (missing == ~complete).all()


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("noinc", [False, True])
def test_cp_async_mbarrier_arrive(noinc, seed):
    source, out = random_array(512), aligned(512)
    count = 64 if noinc else 32
    body = f"""
        @%p0 mbarrier.init.shared::cta.b64 [mb], {count};
        bar.sync 0;
        mul.lo.u32 %r1, %r0, 16;
        cvt.u64.u32 %d0, %r1;
        add.u64 %d0, %d0, %in0;
        mov.u32 %r2, data;
        add.u32 %r2, %r2, %r1;
        cp.async.ca.shared.global [%r2], [%d0], 8;
        cp.async.ca.shared.global [%r2+8], [%d0+8], 8;
        cp.async.mbarrier.arrive{".noinc" if noinc else ""}.shared::cta.b64 [mb];
        mbarrier.arrive.shared::cta.b64 _, [mb];
        """
    run(HEAD + body + wait("W") + move("OUT", 512, "%in1", out=True), source, out, seed=seed)
    assert (out == source).all()


# --- cp.async.bulk


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("space", ["shared::cta", "shared::cluster"])
def test_bulk_load(space, seed):
    source, out = random_array(4096), aligned(4096)
    body = (
        INIT
        + expect(4096)
        + f"""
        @%p0 cp.async.bulk.{space}.global.mbarrier::complete_tx::bytes [data], [%in0], 4096, [mb];
        """
    )
    result = run(HEAD + body + wait("W") + move("OUT", 4096, "%in1", out=True), source, out, seed=seed)
    assert (out == source).all()
    assert result.counters["tma_read"] == 4096
    assert result.counters["tma_transactions"] == 1


@pytest.mark.parametrize("seed", SEEDS)
def test_bulk_load_multicast(seed):
    # CTA 1 sends to ranks 0, 1 and 3 of 4; rank 2's memory stays as it was.
    source, out = random_array(256), aligned(1024)
    body = (
        INIT
        + CLUSTER
        + """
        mov.u32 %r1, %cluster_ctarank;
        mul.lo.u32 %r2, %r1, 256;
        cvt.u64.u32 %d1, %r2;
        add.u64 %d1, %d1, %in1;
        setp.eq.u32 %p1, %r1, 2;
        """
        + move("CLEAR", 256, "%d1", out=False)
        + """
        fence.proxy.async.shared::cta;
        """
        + CLUSTER
        + """
        @%p1 bra DONE;
        """
        + expect(256)
        + """
        setp.eq.u32 %p2, %r1, 1;
        and.pred %p2, %p2, %p0;
        mov.b16 %h0, 0xb;
        @%p2 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster
            [data], [%in0], 256, [mb], %h0;
        """
        + wait("W")
        + "DONE: bar.sync 0;"
        + move("OUT", 256, "%d1", out=True)
        + CLUSTER
    )
    run(HEAD + body, source, out, grid=4, cluster=4, seed=seed)
    want = np.stack([source, source, np.zeros(256, np.uint8), source])
    assert (out.reshape(4, 256) == want).all()


@pytest.mark.parametrize("seed", SEEDS)
def test_bulk_between_ctas(seed):
    # Each CTA fills its memory and sends it to the other one.
    source, out = random_array(512), aligned(512)
    body = (
        INIT
        + """
        mov.u32 %r1, %cluster_ctarank;
        mul.lo.u32 %r2, %r1, 256;
        cvt.u64.u32 %d1, %r2;
        add.u64 %d2, %d1, %in0;
        add.u64 %d1, %d1, %in1;
        """
        + move("IN", 256, "%d2", out=False)
        + PROXY
        + CLUSTER
        + expect(256)
        + """
        xor.b32 %r3, %r1, 1;
        mov.u32 %r4, data;
        mapa.shared::cluster.u32 %r5, %r4, %r3;
        mov.u32 %r6, mb;
        mapa.shared::cluster.u32 %r7, %r6, %r3;
        @%p0 cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%r5+1024], [%r4], 256, [%r7];
        """
        + wait("W")
        + move("OUT", 256, "%d1", out=True, offset=1024)
        + CLUSTER
    )
    run(HEAD + body, source, out, grid=2, cluster=2, seed=seed)
    assert (out.reshape(2, 256) == source.reshape(2, 256)[::-1]).all()


@pytest.mark.parametrize("seed", SEEDS)
def test_bulk_store_and_byte_mask(seed):
    source, out = random_array(1024), aligned(1024, fill=7)
    body = (
        move("IN", 1024, "%in0", out=False)
        + PROXY
        + """
        mov.b16 %h0, 0x8421;
        @%p0 cp.async.bulk.global.shared::cta.bulk_group [%in1], [data], 512;
        @%p0 cp.async.bulk.global.shared::cta.bulk_group.cp_mask [%in1+512], [data+512], 512, %h0;
        cp.async.bulk.commit_group;
        cp.async.bulk.wait_group 0;
        """
    )
    run(HEAD + body, source, out, seed=seed)
    assert (out[:512] == source[:512]).all()
    chosen = np.tile([byte in (0, 5, 10, 15) for byte in range(16)], 32)
    assert (out[512:] == np.where(chosen, source[512:], 7)).all()


def test_the_source_may_be_changed_after_wait_group_read_and_not_before():
    source = random_array(1024)
    seen = {True: 0, False: 0}
    for waits in (True, False):
        for seed in range(1, 21):
            out = aligned(1024)
            body = (
                move("IN", 1024, "%in0", out=False)
                + PROXY
                + """
                @%p0 cp.async.bulk.global.shared::cta.bulk_group [%in1], [data], 1024;
                cp.async.bulk.commit_group;
                """
                + ("cp.async.bulk.wait_group.read 0;" if waits else "")
                + """
                bar.sync 0;
                shl.b32 %r1, %r0, 2;
                mov.u32 %r2, data;
                add.u32 %r1, %r1, %r2;
                st.shared.u32 [%r1], 0;
                cp.async.bulk.wait_group 0;
                """
            )
            run(HEAD + body, source, out, seed=seed)
            seen[waits] += not (out == source).all()
    assert seen[True] == 0
    assert seen[False] > 0


DTYPES = {
    "u32": np.uint32, "s32": np.int32, "u64": np.uint64, "s64": np.int64, "b32": np.uint32, "b64": np.uint64,
    "f16": np.float16, "bf16": ml_dtypes.bfloat16, "f32": np.float32, "f64": np.float64,
}  # fmt: skip
OPERATIONS = {
    "add": lambda a, b: a + b,
    "min": np.minimum,
    "max": np.maximum,
    "inc": lambda a, b: np.where(a >= b, 0, a + 1),
    "dec": lambda a, b: np.where((a == 0) | (a > b), b, a - 1),
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}
GLOBAL_FORMS = (
    [("add", t) for t in ("u32", "s32", "u64", "f32", "f64", "noftz.f16", "noftz.bf16")]
    + [(op, t) for op in ("min", "max") for t in ("u32", "s32", "u64", "s64", "f16", "bf16")]
    + [("inc", "u32"), ("dec", "u32")]
    + [(op, t) for op in ("and", "or", "xor") for t in ("b32", "b64")]
)
SHARED_FORMS = (
    [("add", t) for t in ("u32", "s32", "u64")]
    + [(op, t) for op in ("min", "max") for t in ("u32", "s32")]
    + [("inc", "u32"), ("dec", "u32"), ("and", "b32"), ("or", "b32"), ("xor", "b32")]
)


def operands(kind, n=64):
    dtype = np.dtype(DTYPES[kind.split(".")[-1]])
    rng = np.random.default_rng(5)
    values = rng.integers(-50 if dtype.kind in "iV" or dtype.kind == "f" else 0, 50, (2, n))
    a, b = aligned(n, dtype), aligned(n, dtype)
    a[...], b[...] = values[0].astype(dtype), values[1].astype(dtype)
    if dtype.kind not in "iu":  # halves and eighths, so that something is rounded
        a[...] = (a.astype(np.float64) * 1.125).astype(dtype)
    return a, b


@pytest.mark.parametrize("seed", [0, 3])
@pytest.mark.parametrize(("operation", "kind"), GLOBAL_FORMS)
def test_bulk_reduce_to_global(operation, kind, seed):
    a, b = operands(kind)
    want = OPERATIONS[operation](a, b).astype(a.dtype)
    body = (
        move("IN", b.nbytes, "%in1", out=False)
        + PROXY
        + f"""
        @%p0 cp.reduce.async.bulk.global.shared::cta.bulk_group.{operation}.{kind} [%in0], [data], {b.nbytes};
        """
        + COMMIT
        + "cp.async.bulk.wait_group 0;"
    )
    run(HEAD + body, a, b, seed=seed)
    assert (a == want).all()


@pytest.mark.parametrize(("operation", "kind"), SHARED_FORMS)
def test_bulk_reduce_to_another_cta(operation, kind):
    a, b = operands(kind)
    want = OPERATIONS[operation](a, b).astype(a.dtype)
    n = a.nbytes
    body = (
        INIT
        + """
        mov.u32 %r1, %cluster_ctarank;
        setp.eq.u32 %p1, %r1, 0;
        selp.b64 %d1, %in0, %in1, %p1;
        """
        + move("IN", n, "%d1", out=False)
        + PROXY
        + CLUSTER
        + f"""
        mov.u32 %r4, data;
        mapa.shared::cluster.u32 %r5, %r4, 0;
        mov.u32 %r6, mb;
        mapa.shared::cluster.u32 %r7, %r6, 0;
        @%p1 bra RECEIVE;
        @%p0 cp.reduce.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes.{operation}.{kind}
            [%r5], [%r4], {n}, [%r7];
        bra END;
        RECEIVE:
        """
        + expect(n)
        + wait("W")
        + move("OUT", n, "%in0", out=True)
        + "END:"
        + CLUSTER
    )
    for seed in (0, 1, 2):
        to = aligned(a.shape, a.dtype)
        to[...] = a
        run(HEAD + body, to, b, grid=2, cluster=2, seed=seed)
        assert (to == want).all(), seed


def test_bulk_reduce_f32_flushes_and_counts_every_lane():
    # Subnormal inputs and results become zeros of the same sign; and 32 lanes reduce 32 times.
    a, b = aligned(8, np.float32), aligned(8, np.float32)
    tiny = np.float32(1e-40)
    a[:] = [tiny, -tiny, 1, np.float32(2**-126), 0, 0, 0, 1]
    b[:] = [tiny, -tiny, tiny, -np.float32(1.5 * 2**-126), -tiny, 0, 0, 2]
    one = move("IN", 32, "%in1", out=False) + PROXY + "{}cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 "
    one += "[%in0], [data], 32;" + COMMIT + "cp.async.bulk.wait_group 0;"
    run(HEAD + one.format("@%p0 "), a, b)
    assert a.tolist() == [0, 0, 1, 0, 0, 0, 0, 3]
    assert np.signbit(a).tolist() == [False, True, False, True, False, False, False, False]
    run(HEAD + one.format(""), a, b)
    assert a[7] == 3 + 32 * 2


def test_bulk_prefetch_is_checked_and_does_nothing():
    source = random_array(64)
    run(HEAD + "cp.async.bulk.prefetch.L2.global [%in0], 64;", source)
    with pytest.raises(PtxError, match="reads 80 bytes"):
        run(HEAD + "@%p0 cp.async.bulk.prefetch.L2.global [%in0], 80;", source)


LOAD = "@%p0 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [data{}], [%in0{}], {}, [mb];"
MISUSE = {
    "size": (LOAD.format("", "", 24), "24 bytes, not a multiple of 16"),
    "shared alignment": (LOAD.format("+8", "", 16), "not aligned to 16"),
    "global alignment": (LOAD.format("", "+4", 16), "not aligned to 16"),
    "out of bounds": (LOAD.format("", "+48", 32), "reads 32 bytes at global address"),
    "no mbarrier": (LOAD.format("", "", 16).replace("[mb]", "[mb+8]"), "before mbarrier.init"),
    "another CTA": (
        "mov.u32 %r1, data; or.b32 %r1, %r1, 0x1000000;"
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%in0], 16, [mb];",
        "CTA rank 1 of a cluster of 1",
    ),
    "multicast beyond the cluster": (
        "@%p0 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
        " [data], [%in0], 16, [mb], 3;",
        "CTA rank 1 is not in the cluster of 1",
    ),
    "read-only": ("@%p0 cp.async.bulk.global.shared::cta.bulk_group [%in0], [data], 16;", "read-only"),
    "cp.async src-size": ("cp.async.ca.shared.global [data], [%in0], 4, 8;", "src-size 8 is larger"),
    "cp.async alignment": ("cp.async.ca.shared.global [data+4], [%in0], 8;", "not aligned to 8"),
    "cp.async bounds": ("cp.async.cg.shared.global [data], [%in0+64], 16;", "reads 16 bytes"),
}  # fmt: skip


@pytest.mark.parametrize("name", MISUSE)
@pytest.mark.parametrize("seed", [0, 1])
def test_misuse(name, seed):
    body, message = MISUSE[name]
    with pytest.raises(PtxError, match=message):
        source = random_array(64)
        source.flags.writeable = False
        run(HEAD + INIT + body, source, seed=seed)


@pytest.mark.parametrize(
    "form",
    [
        "cp.async.cg.shared.global [data], [%in0], 8;",
        "cp.async.ca.shared.global [data], [%in0], 12;",
        "cp.async.bulk.global.shared::cta.mbarrier::complete_tx::bytes [%in0], [data], 16, [mb];",
        "cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes.multicast::cluster [data], [%in0], 16, [mb], 1;",
        "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f16 [%in0], [data], 16;",
        "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.s64 [%in0], [data], 16;",
        "cp.reduce.async.bulk.global.shared::cta.bulk_group.and.u32 [%in0], [data], 16;",
        f"cp.reduce.async.bulk.shared::cluster.shared::cta.{BYTES}.add.f32 [data], [data], 16, [mb];",
        "cp.async.bulk.wait_group %r0;",
        "multimem.cp.async.bulk.global.shared::cta.bulk_group [%in0], [data], 16;",
    ],
)
def test_forms_that_do_not_exist(form):
    with pytest.raises(PtxError, match="line"):
        run(HEAD + form, random_array(64))


# --- st.async, red.async, st.bulk

REMOTE = (
    INIT
    + CLUSTER
    + """
    mov.u32 %r1, %cluster_ctarank;
    xor.b32 %r2, %r1, 1;
    mul.lo.u32 %r3, %r0, {size};
    mov.u32 %r4, data;
    add.u32 %r4, %r4, %r3;
    mapa.shared::cluster.u32 %r5, %r4, %r2;
    mov.u32 %r6, mb;
    mapa.shared::cluster.u32 %r7, %r6, %r2;
    mad.lo.u32 %r8, %r1, 1000, %r0;
    """
)
ENDING = """
    mul.lo.u32 %r9, %r1, {total};
    cvt.u64.u32 %d1, %r9;
    add.u64 %d1, %d1, %in0;
    """


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("form", ["u32", "b64", "v2.b32", "v4.f32", "v2.u64"])
def test_st_async(form, seed):
    n = int(form[1]) if form[0] == "v" else 1
    width = int(form[-2:]) // 8
    size, total = n * width, 32 * n * width
    register = "%r8" if width == 4 else "%d2"
    values = register if n == 1 else "{" + ", ".join([register] * n) + "}"
    out = aligned(2 * total)
    body = (
        REMOTE.format(size=size)
        + expect(total)
        + CLUSTER
        + f"""
        cvt.u64.u32 %d2, %r8;
        st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.{form} [%r5], {values}, [%r7];
        """
        + wait("W")
        + ENDING.format(total=total)
        + move("OUT", total, "%d1", out=True)
        + CLUSTER
    )
    run(HEAD + body, out, grid=2, cluster=2, seed=seed)
    got = out.view(np.uint32 if width == 4 else np.uint64).reshape(2, 32, n)
    want = np.arange(32)[None, :, None] + np.array([1000, 0])[:, None, None]
    assert (got == want).all()


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize(("operation", "kind"), SHARED_FORMS)
def test_red_async(operation, kind, seed):
    dtype = np.dtype(DTYPES[kind])
    a, b = operands(kind, 32)
    out = aligned(64, dtype)
    total, register = a.nbytes, "%r10" if dtype.itemsize == 4 else "%d3"
    suffix = "u32" if dtype.itemsize == 4 else "u64"
    body = (
        REMOTE.format(size=dtype.itemsize)
        + f"""
        mad.wide.u32 %d4, %r0, {dtype.itemsize}, %in2;
        ld.global.{suffix} {register}, [%d4];
        """
        + move("IN", total, "%in1", out=False)
        + expect(total)
        + CLUSTER
        + f"""
        red.async.relaxed.cluster.shared::cluster.{BYTES}.{operation}.{kind} [%r5], {register}, [%r7];
        """
        + wait("W")
        + ENDING.format(total=total)
        + move("OUT", total, "%d1", out=True)
        + CLUSTER
    )
    run(HEAD + body, out, a, b, grid=2, cluster=2, seed=seed)
    want = OPERATIONS[operation](a, b).astype(dtype)
    assert (out.reshape(2, 32) == want).all()


def test_release_forms_to_global():
    out = aligned(64, np.uint32, fill=5)
    body = """
        mad.wide.u32 %d0, %r0, 4, %in0;
        st.async.release.gpu.global.u32 [%d0], %r0;
        red.async.release.gpu.global.add.u32 [%d0+128], %r0;
        """
    for seed in (0, 1):
        out[:] = 5
        run(HEAD + body, out, seed=seed)
        assert (out[:32] == np.arange(32)).all()
        assert (out[32:] == np.arange(32) + 5).all()


def test_st_bulk_writes_zeros():
    source, out = random_array(256), aligned(256)
    body = (
        move("IN", 256, "%in0", out=False)
        + """
        @%p0 st.bulk.weak.shared::cta [data+64], 128, 0;
        bar.sync 0;
        """
        + move("OUT", 256, "%in1", out=True)
    )
    run(HEAD + body, source, out)
    want = source.copy()
    want[64:192] = 0
    assert (out == want).all()


def test_remote_misuse():
    with pytest.raises(PtxError, match="more than one CTA"):
        run(HEAD + INIT + "st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [data], %r0, [mb];")
    same = (
        REMOTE.format(size=4)
        + "red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes.add.u32 [%r4], %r0, [mb];"
    )
    with pytest.raises(PtxError, match="another CTA"):
        run(HEAD + same, grid=2, cluster=2)
    apart = REMOTE.format(size=4) + "st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [%r5], %r0, [mb];"
    with pytest.raises(PtxError, match="have to be in one CTA"):
        run(HEAD + apart, grid=2, cluster=2)
