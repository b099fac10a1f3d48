"""Random signatures: what is drawn, that it is the same everywhere, that a wrong kernel is found and made simple."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter

import pytest
import torch
from typer.testing import CliRunner

from tests.targets import needs
from torch_attnkit import cli
from torch_attnkit.core.dispatch import OPS
from torch_attnkit.core.target import Target
from torch_attnkit.parity import judge, properties, random_run
from torch_attnkit.parity.signatures import Signature, Source, build, lay, moved, parse, refusal, signature, storage
from torch_attnkit.sim import metal, ptx

ARCHS = ("cpu", "metal", "sm90", "sm100")


def source(arch: str, *ops: str, seed: int = 5, kernels: int = 96) -> Source:
    ops = ops or tuple(name for name, op in OPS.items() if any(arch in row.archs for row in op.kernels))
    return Source(seed, arch, ops, kernels, properties.SIMULATED, schedules=4 if arch.startswith("sm") else 1)


def test_every_op_with_a_kernel_draws():
    assert [name for name, op in OPS.items() if op.kernels and not hasattr(op.module("cases"), "sample")] == []


# What a user's call of these ops may look like, and in how many of 500 signatures at least.
ABOUT = (
    "flash_attention", "flash_attention_varlen", "gated_rmsnorm", "merge_partials", "sdpa_decode", "sdpa_decode_paged",
    "sdpa_multi",
)  # fmt: skip
PROPERTIES = {
    "expanded batch or heads": (40, lambda f: any(".at" in n and "x" in v for n, v in f.items())),
    "offset": (100, lambda f: any(".at" in n and "off" in v for n, v in f.items())),
    "rows apart": (100, lambda f: any(".at" in n and "pad" in v for n, v in f.items())),
    "axes in another order": (30, lambda f: any(".at" in n and "swap" in v for n, v in f.items())),
    "garbage where nobody may look": (150, lambda f: f["hidden"]),
    "nan that is looked at": (5, lambda f: f["nan"]),
    "sinks of 1e4": (10, lambda f: f["sink"] in ("high", "mixed")),
    "sinks of -inf": (10, lambda f: f["sink"] in ("never", "mixed")),
    "scores of 1e3": (25, lambda f: f["q_by"] > 100),
    "no window at all": (3, lambda f: f["window"] == 0),
    "windows above 2^31": (15, lambda f: f["window"] >= 2**31),
    "sink tokens": (40, lambda f: f["sink_tokens"] > 0),
    "softcap": (60, lambda f: f["softcap"] > 0),
    "Dv is not D": (40, lambda f: f["Dv"] != f["D"]),
    "a given scale": (60, lambda f: f["scale"] != ""),
    "a scale of 0 or less": (20, lambda f: f["scale"] != "" and f["scale"] <= 0),
    "ragged lengths": (100, lambda f: len({*f["kv_len"].split("/"), *f["len_k"].split("/")} - {"", "1"}) > 1),
    "lengths of 0": (30, lambda f: "0" in f["kv_len"].split("/") or "0" in f["len_k"].split("/")),
    "no sequence": (2, lambda f: f["B"] == 0),
    "no query": (1, lambda f: f["T"] == 0),
    "no key": (2, lambda f: f["S"] == 0),
    "more queries than keys": (15, lambda f: f["T"] > f["S"]),
    "long": (10, lambda f: f["S"] > 500),
    "shared pages": (10, lambda f: f["pages"] in ("shared", "one")),
    "one tensor for both caches": (5, lambda f: f["same"]),
    "hostile schedules": (300, lambda f: f["schedule"] > 0),
}
_OF_ONE_ARCH = {"Dv is not D": "metal", "hostile schedules": "sm90"}


@pytest.fixture(scope="module")
def facts():
    return {arch: [source(arch, *ABOUT).sample(i).given() for i in range(600)] for arch in ARCHS[1:]}


@pytest.mark.parametrize("name", PROPERTIES)
def test_draws_have(name, facts):
    least, holds = PROPERTIES[name]
    for arch in (_OF_ONE_ARCH.get(name),) if name in _OF_ONE_ARCH else facts:
        assert sum(bool(holds(f)) for f in facts[arch]) >= least, arch


@pytest.mark.parametrize("arch", ARCHS[1:])
def test_draws_reach_every_row_and_dtype(arch):
    chosen = Counter()
    for sampled in (source(arch, kernels=240).sample(index) for index in range(720)):
        op, f = OPS[sampled.op], sampled.given()
        fits = [i for i, row in enumerate(op.kernels) if arch in row.archs and f["dtype"] in row.dtypes.split()
                and all(f.get(axis) in sizes for axis, sizes in row.dims.items())]  # fmt: skip
        chosen[op.name, fits[0]] += 1
    rows = {(n, i) for n, op in OPS.items() for i, row in enumerate(op.kernels) if arch in row.archs}
    assert len(rows & set(chosen)) >= 0.6 * len(rows), rows - set(chosen)


@pytest.mark.parametrize("arch", ARCHS)
def test_the_table_accepts_nearly_all_that_is_drawn(arch):
    sampled = [source(arch).sample(i) for i in range(150)]
    refused = [why for s in sampled if (why := refusal(OPS[s.op], arch, *build(s)))]
    assert len(refused) <= 3, refused


DIGEST = """
import sys, zlib, torch
from torch_attnkit.parity import properties
from torch_attnkit.parity.signatures import Source, build, storage
found = []
for arch, ops in (("metal", ("sdpa_decode", "merge_partials")), ("sm90", ("flash_attention_varlen", "gated_rmsnorm"))):
    for index in (0, 3, 97, 1001):
        s = Source(7, arch, ops, 16, properties.SIMULATED).sample(index)
        tensors = [t for t in build(s)[0] if isinstance(t, torch.Tensor)]
        found.append((str(s), [zlib.crc32(storage(t).numpy().tobytes()) for t in tensors]))
print(found)
"""


def test_a_seed_and_an_index_are_the_same_call_in_every_process(capsys):
    exec(compile(DIGEST, "<digest>", "exec"), {})
    here = capsys.readouterr().out
    elsewhere = subprocess.run([sys.executable, "-c", DIGEST], capture_output=True, text=True, check=True).stdout
    assert elsewhere == here and len(set(here.split("('"))) > 6


def test_numbers_do_not_depend_on_the_machine():
    from torch_attnkit.oracle.sampling import randn

    # Of the Mersenne twister's integers, by additions: vector units and mathematics libraries have no say in them.
    got = randn(torch.Generator().manual_seed(1), 40)
    a, b, c = (torch.rand(40, generator=gen) for gen in [torch.Generator().manual_seed(1)] for _ in range(3))
    assert torch.equal(got, 2 * ((a + b) + (c - 1.5)))
    assert [x.hex() for x in got[:2].tolist()] == ["0x1.9633080000000p-1", "-0x1.9e75d80000000p+0"]


@pytest.mark.parametrize("arch", ARCHS)
def test_a_signature_survives_its_text(arch):
    for index in range(200):
        s = source(arch).sample(index)
        assert parse(s.op, str(s)) == s


def test_a_word_that_is_no_fact_is_refused():
    with pytest.raises(ValueError, match="'B' is no fact, accepted: words such as B=2"):
        parse("sdpa_decode", "S=3 B")


def test_layouts_hold_the_values_that_they_were_given():
    t = torch.arange(2 * 3 * 4 * 5.0).view(2, 3, 4, 5)
    for at, strides in {
        "": (60, 20, 5, 1), "off3": (60, 20, 5, 1), "pad2": (84, 28, 7, 1), "gap": (100, 25, 5, 1),
        "swap": (60, 5, 15, 1), "off1+pad3+gap+swap": (160, 8, 32, 1),
    }.items():  # fmt: skip
        laid = lay(t, at)
        assert torch.equal(laid, t), at
        assert laid.stride() == strides or "gap" in at, at
        assert laid.storage_offset() == sum(int(w[3:]) for w in at.split("+") if w[:3] == "off")
    expanded = lay(t, "off2+x1")
    assert expanded.stride(1) == 0 and torch.equal(expanded, t[:, :1].expand(t.shape))
    assert lay(t[:0], "x0+pad1").shape == (0, 3, 4, 5)


def test_copies_lie_as_what_they_copy_and_share_what_it_shares():
    t = lay(torch.randn(2, 3, 4), "off3+pad2+gap")
    a, b, c = moved((t, t, t.clone()), "cpu")
    assert a.stride() == t.stride() and a.storage_offset() == 3 and torch.equal(a, t)
    assert a.data_ptr() == b.data_ptr() != c.data_ptr() and a.data_ptr() != t.data_ptr()
    assert torch.equal(storage(a), storage(t)), "the poison around a tensor is copied too"


def test_what_is_simpler_has_one_fact_nearer_to_its_default():
    s = parse("flash_attention", "T=9 kv_len=3/4 q.at=off1+pad2 window=5")
    texts = set(map(str, properties.simpler(s)))
    assert {"kv_len=3/4 q.at=off1+pad2 window=5", "T=5 kv_len=3/4 q.at=off1+pad2 window=5"} <= texts
    assert {"T=9 kv_len=4 q.at=off1+pad2 window=5", "T=9 kv_len=3/4 q.at=pad2 window=5"} <= texts
    assert all(sum(dict(s.facts).get(n) != v for n, v in parse("flash_attention", t).facts) <= 1 for t in texts)
    assert list(properties.simpler(parse("flash_attention", ""))) == []


def off_by_a_bit(build_):
    """A kernel that errs by a tenth from the 17th key on."""

    def build(call, target):
        launch = build_(call, target)

        def run(*args):
            launch(*args)
            if call.dim["S"] > 16:
                args[-3].mul_(1.1)

        return run

    return build


@pytest.fixture
def run(monkeypatch):
    monkeypatch.setattr(cli.console, "_width", 4000)
    return lambda *argv: CliRunner().invoke(cli.app, ("parity", *argv))


def test_a_wrong_kernel_is_found_made_simple_and_repeated(run, monkeypatch):
    module = OPS["flash_attention"].module("cpu")
    monkeypatch.setattr(module, "build", off_by_a_bit(module.build))
    result = run("--random", "12", "--seed", "1", "--target", "cpu", "--op", "flash_attention", "--kernels", "4")
    assert result.exit_code == 1, result.output
    lines = [line.strip() for line in result.output.splitlines() if line.strip().startswith("python -m torch_attnkit")]
    assert "is over the tolerance" in result.output and len(lines) >= 2
    repeats = [line.split("--repeat ")[1].strip("'") for line in lines]
    first, simple = (parse("flash_attention", text) for text in (repeats[0], min(repeats, key=len)))
    assert dict(simple.facts)["S"] == 17 and set(dict(simple.facts)) <= {"dtype", "S", "seed"}
    assert len(first.facts) > 3
    for chosen in (first, simple):
        again = run(*random_run.command(Target("cpu"), chosen).split("parity ")[1].split(" --repeat")[0].split(),
                    "--repeat", str(chosen))  # fmt: skip
        assert again.exit_code == 1 and "wrong" in again.output
    monkeypatch.undo()
    assert run("--op", "flash_attention", "--target", "cpu", "--repeat", str(simple)).exit_code == 0


@pytest.mark.parametrize("fault", ["raises", "writes beside an input"])
def test_whatever_an_accepted_signature_does_wrong_is_a_failure(monkeypatch, fault):
    module = OPS["flash_attention"].module("cpu")
    build_ = module.build

    def broken(call, target):
        launch = build_(call, target)

        def run(*args):
            if fault == "raises":
                raise OSError("no such pipeline")
            launch(*args)
            storage(args[0])[:1] = 7

        return run

    monkeypatch.setattr(module, "build", broken)
    result = properties.judged(parse("flash_attention", "S=3 T=2 q.at=off8"), "cpu", "cpu")
    assert result.kind == "wrong"
    assert ("OSError: no such pipeline" if fault == "raises" else "memory around an input") in result.message


def test_a_result_may_be_off_by_what_the_reference_is_off_by_on_other_numbers():
    exact, lucky = torch.ones(3, dtype=torch.float64), torch.ones(3)
    none, some = torch.zeros(3, dtype=torch.float64), torch.tensor([0, 0, 1e-4], dtype=torch.float64)
    near, far = torch.tensor([1.0, 1.0001, 1.0]), torch.tensor([1.0, 1.1, 1.0])
    assert judge._within("lse", near, exact, lucky, none, some) > 0
    for others in ((), (none,)):
        with pytest.raises(AssertionError, match=r"lse\[1\]: got 1.0001"):
            judge._within("lse", near, exact, lucky, *others)
    with pytest.raises(AssertionError, match=r"over the tolerance 4.77e-07"):  # in the words of the first one
        judge._within("lse", far, exact, lucky, none, some)


def test_a_signature_in_doubt_is_asked_of_other_seeds_too(monkeypatch):
    asked = []

    def judged(*call):
        asked.append(call[6:])
        assert len(asked) > 1, "in doubt"
        return 0.5

    monkeypatch.setattr(judge, "judge", judged)
    chosen = parse("flash_attention", "S=3 T=2 seed=5")
    assert properties.judged(chosen, "cpu", "cpu").kind == "right"
    (first,), others = build(chosen)[0][:1], [args[0] for args in asked[1][0]]
    assert len(others) == 8 and not any(torch.equal(first, q) for q in others)
    assert all(q.shape == first.shape for q in others)


def test_what_the_table_refuses_is_no_failure_and_does_not_count(run):
    refused = properties.judged(parse("flash_attention", "dtype=f64 S=3 T=2"), "cpu", "cpu")
    assert refused.kind == "refused" and "dtype f64 not in" in refused.message
    assert run("--op", "flash_attention", "--target", "cpu", "--repeat", "dtype=f64 S=3").exit_code == 1
    kinds = iter(("refused", "right", "refused", "right", "right", "right", "right"))

    def each(judged, indexes):
        return [properties.Result(Signature("flash_attention", (("S", i),)), next(kinds)) for i in indexes]

    results = list(random_run.accepted(source("cpu"), "cpu", 4, each))
    assert Counter(r.kind for r in results) == {"right": 4, "refused": 2}
    assert [r.signature.facts[0][1] for r in results] == [0, 1, 2, 3, 4, 5], "every index once"


def test_a_right_result_near_to_its_tolerance_is_named(run, monkeypatch):
    """The nearest one alone, as a line that repeats it."""
    errors = iter((0.79, 0.97, 0.95))
    judged = lambda chosen, arch, device: properties.Result(chosen, "right", next(errors))
    monkeypatch.setattr(properties, "judged", judged)
    argv = ("--random", "3", "--target", "cpu", "--op", "flash_attention")
    lines = [line for line in run(*argv).output.splitlines() if "of the tolerance:" in line]
    assert len(lines) == 1 and lines[0].startswith("0.970 of the tolerance: python -m torch_attnkit parity --op")
    errors = iter((0.79, 0.1, 0.2))
    assert "of the tolerance:" not in run(*argv).output


def test_processes_are_replaced_and_results_stay_in_order(monkeypatch):
    monkeypatch.setattr(judge, "_CALLS", 2)
    with judge.workers(2) as each:
        found = list(each(eval, [f"({n}, __import__('os').getpid())" for n in range(10)]))
        assert list(each(eval, ["1 + 1"])) == [2]
    assert [n for n, _ in found] == list(range(10))
    assert len({pid for _, pid in found}) >= 3, "four calls of two processes, then others"


def test_a_run_in_processes_is_the_run_in_one(run):
    argv = ("--random", "8", "--seed", "2", "--target", "cpu", "--kernels", "4")
    table = [run(*argv, "--jobs", jobs).output.split("largest error")[1] for jobs in ("1", "2")]
    assert table[0] == table[1] and "flash_attention" in table[0]


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (("--random", "5", "--op", "foo"), "no op 'foo'; there are causal_conv1d, flash_attention,"),
        (("--op", "foo"), "no op 'foo'; there are causal_conv1d, flash_attention,"),
        (("--random", "5", "--target", "sm75"), "'sm75', accepted: cpu, metal, sm80, sm89, sm90, sm100, sm120"),
        (("--repeat", "S=3", "--op", "sdpa_decode"), "--repeat needs --op and --target"),
        (("--repeat", "S", "--op", "flash_attention", "--target", "cpu"), "'S' is no fact"),
    ],
)
def test_words_that_are_wrong_are_named(run, argv, expected):
    result = run(*argv)
    assert result.exit_code == 2 and expected in " ".join(result.output.replace("│", " ").split())


def test_a_run_of_nothing_is_no_success(run):
    op = next(op.name for op in OPS.values() if all(row.on != "cpu" for row in op.kernels))
    result = run("--random", "5", "--target", "cpu", "--op", op)
    assert result.exit_code == 1 and f"there is no kernel of {op}" in result.output


# Found by random signatures, simplified by them, and mended.
REGRESSIONS = [
    ("sm90", "sdpa_decode", "S=5 q.at=off3"),
    ("sm90", "sdpa_decode", "S=5 group=9 k_cache.at=off3 same=1"),
    ("sm90", "sdpa_decode_paged", "v_cache.at=off1 k_cache.at=off8 hidden=nan kv_len=9"),
    ("sm90", "gated_rmsnorm", "N=8 y32=1 y.at=off4"),
    ("cpu", "flash_attention", "dtype=f32 causal=1 T=2 sink=never"),
    ("cpu", "flash_attention", "nan=k"),
    ("cpu", "flash_attention", "causal=1 T=16 S=16 scale=0.0"),
    ("cpu", "flash_attention", "S=9 T=9 window=2 nan=k sink=plain"),
    ("cpu", "flash_attention", "T=255 S=2 window=63 sink_tokens=2"),
    ("metal", "flash_attention", "T=3 S=2 window=0 hidden=nan"),
    ("metal", "sdpa_multi", "T=5 S=9 causal=1 window=0 sink_tokens=2 hidden=inf"),
    ("sm90", "flash_attention", "S=60 T=44 softcap=50.0 normalize=0"),
    ("sm90", "flash_attention_varlen", "len_k=70 S=70 len_q=70 T=70 softcap=50.0 normalize=0"),
    ("sm100", "flash_attention", "S=60 T=44 softcap=50.0 normalize=0"),
    ("sm90", "flash_attention", "T=6 S=242 causal=1 window=7 sink_tokens=3 hidden=nan"),
    ("sm90", "flash_attention_varlen", "T=60 S=242 len_q=60 len_k=242 window=0 hidden=nan"),
    ("sm90", "flash_attention_varlen", "scale=0.0"),
    ("sm90", "flash_attention", "normalize=0 Hkv=2 scale=1.0 q_by=3"),
    ("sm90", "flash_attention", "normalize=0 T=220 S=220 scale=1.0 kv_len=1"),
    ("sm100", "flash_attention", "normalize=0 Hkv=2 scale=1.0 q_by=3"),
    ("sm100", "flash_attention", "T=129 S=513"),
    ("sm100", "flash_attention", "D=512 Dv=512 normalize=0 Hkv=2 scale=1.0 q_by=3"),
    ("sm90", "flash_attention", "T=7 S=12 B=4 scale=-0.1 q.at=gap+swap"),
    ("sm90", "sdpa_multi", "T=7 S=12 B=4 scale=-0.1 q.at=gap+swap"),
    ("sm90", "sdpa_multi", "scale=0.0 kv_len=1"),
    ("sm100", "flash_attention", "scale=0.0 dtype=f8e4m3 scales=q"),
    ("sm90", "sdpa_multi", "T=6 S=242 causal=1 window=7 hidden=nan"),
    ("sm100", "flash_attention", "T=6 S=242 causal=1 window=7 sink_tokens=3 hidden=nan"),
    ("sm100", "flash_attention", "D=512 Dv=512 T=6 S=242 causal=1 window=7 hidden=nan"),
    ("sm100", "sdpa_multi", "T=6 S=242 causal=1 window=7 hidden=inf"),
    ("sm100", "sdpa_decode", "S=5 group=9 k_cache.at=off3+x1 q.at=off1"),
    ("sm90", "sparse_fmha_with_swa", "D=512 far=all C=600 T=30 q_by=300 kv_start=1"),
    ("sm90", "sparse_fmha_with_swa", "D=512 far=all C=2500 normalize=0 nan=q T=1"),
    ("sm90", "inverse_rope_fp4", "T=2 o.at=x0"),
    ("sm90", "inverse_rope_fp4", "H=2 R2=1 o.at=gap+x1"),
    ("sm90", "inverse_rope_fp4", "T=2 R2=1 sin.at=pad5"),
    ("sm100", "sparse_fmha_inverse_rope_fp4", "D=128 S=9 window=1 sink=high format=nvfp4 rope=0 gs=1.0 R2=32 blk=16"),
]


# Scores a hundred times the cap, where exp overflows: such a signature is not drawn, see ``sampling._LARGE``.
SATURATED = [
    (arch, op, "S=60 T=44 softcap=2.0 q_by=300")
    for arch in ("metal", "sm90", "sm100")
    for op in ("flash_attention", "sdpa_multi", "sdpa_decode")
]


@pytest.mark.sample(5)
@pytest.mark.parametrize(("arch", "op", "text"), REGRESSIONS + SATURATED, ids=lambda v: v.replace(" ", ","))
def test_what_was_found_stays_mended(arch, op, text):
    needs(arch)
    with ptx.settings(check=True), metal.settings(mode="checked", strict=True):
        result = properties.judged(signature(op, dict(parse(op, text).facts) | dict(seed=1)), arch, "cpu")
    assert result.kind == "right", result.message
