"""A digest changes with what a result depends on, and with nothing else."""

from __future__ import annotations

import pytest

from torch_attnkit import digest, parity, paths
from torch_attnkit.core import Target
from torch_attnkit.core.support import support
from torch_attnkit.cuda import compile

KERNEL = '''"""A kernel."""
from torch_attnkit.cuda import tiles
from torch_attnkit.core import op

SIZE = 4  # rows


def kernel(x):
    """What it does."""
    return tiles.load(x, f"torch_attnkit.cuda.{op.ARCH}.fast")
'''
SOURCES = {
    "torch_attnkit.kernel": KERNEL,
    "torch_attnkit.core.op": "ARCH = 'sm90'",
    "torch_attnkit.cuda": "",
    "torch_attnkit.cuda.tiles": "def load(x, name):\n    return x\n",
    "torch_attnkit.cuda.other": "A = 1",
    "torch_attnkit.cuda.sm90.fast": "B = 1",
    "torch_attnkit.cuda.sm100.fast": "C = 1",
}
CACHED = [f for f in vars(digest).values() if hasattr(f, "cache_clear")]


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Digests of a small package: call it with changed sources."""

    def clear():
        for function in CACHED:
            function.cache_clear()

    def of(changes=None, arch="", function=digest.of_modules, names=("torch_attnkit.kernel",)):
        files = {}
        for name, text in (SOURCES | (changes or {})).items():
            files[name] = tmp_path / (f"{name}/__init__.py" if name == "torch_attnkit.cuda" else f"{name}.py")
            files[name].parent.mkdir(exist_ok=True)
            files[name].write_text(text)
        clear()
        with monkeypatch.context() as patch:
            patch.setattr(digest, "_modules", lambda: files)
            return function(*names, **({"arch": arch} if arch else {}))

    yield of
    clear()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("# rows", "# columns of a tile"),
        ('"""What it does."""', '"""What it does, and how."""'),
        ('"""A kernel."""', '"""Another text."""'),
        ("SIZE = 4", "\n\nSIZE   =   4"),
    ],
)
def test_comments_docstrings_and_layout_change_nothing(package, old, new):
    assert old in KERNEL
    assert package({"torch_attnkit.kernel": KERNEL.replace(old, new)}) == package()


@pytest.mark.parametrize(
    "changes",
    [
        {"torch_attnkit.kernel": KERNEL.replace("SIZE = 4", "SIZE = 5")},
        {"torch_attnkit.kernel": KERNEL.replace('f"', '"text" + f"')},
        {"torch_attnkit.cuda.tiles": "def load(x, name):\n    return x + 1\n"},
        {"torch_attnkit.cuda.sm90.fast": "B = 2"},
    ],
)
def test_code_of_the_kernel_and_of_what_it_uses_counts(package, changes):
    assert package(changes) != package()


@pytest.mark.parametrize("module", ["torch_attnkit.cuda.other", "torch_attnkit.core.op"])
def test_what_it_does_not_use_and_what_all_calls_pass_through_does_not_count(package, module):
    assert package({module: "Z = 26"}) == package()


def test_a_kernel_that_is_named_for_another_arch_does_not_count(package):
    other = {"torch_attnkit.cuda.sm100.fast": "C = 2"}
    assert package(other, arch="sm90") == package(arch="sm90")
    assert package(other, arch="sm100") != package(arch="sm100")


@pytest.mark.parametrize("importer", ["torch_attnkit.kernel", "torch_attnkit.cuda.sm90.fast"])
def test_an_import_of_another_archs_module_counts_where_an_arch_makes_it(package, importer):
    """One of a module of no architecture is for the other one's sake."""
    imports = {importer: "from torch_attnkit.cuda.sm100 import fast\n\n\ndef f():\n    return fast.C\n"}
    for function, names in ((digest.of_modules, (importer,)), (digest.of_definitions, (importer, "f"))):
        of = lambda more, function=function, names=names: package(imports | more, "sm90", function, names)
        assert (of({}) != of({"torch_attnkit.cuda.sm100.fast": "C = 2"})) == (importer != "torch_attnkit.kernel")


def test_of_a_module_only_the_definitions_that_are_used_count(package):
    text = "A = 1\nB = A + 1\nC = 3\n\n\ndef f():\n    return B\n"
    name = "torch_attnkit.kernel"

    def of(text):
        return package({name: text}, function=digest.of_definitions, names=(name, "f"))

    assert of(text.replace("C = 3", "C = 4")) == of(text)
    assert of(text.replace("A = 1", "A = 2")) != of(text)


def test_of_a_function_what_others_of_its_module_name_does_not_count(package):
    launch = """
from torch_attnkit.cuda import other, tiles

FAST = "torch_attnkit.cuda.sm90.fast"


def f(x):
    return g(FAST, x)


def g(name, x):
    return tiles.load(x, name)


def h(x):
    return other.Z, "torch_attnkit.cuda.sm100.fast"
"""

    def reached(name):
        return package({"torch_attnkit.kernel": launch}, function=digest.reach, names=(name,))

    of_f = reached("torch_attnkit.kernel:f")
    assert {"torch_attnkit.kernel", "torch_attnkit.cuda.tiles", "torch_attnkit.cuda.sm90.fast"} <= of_f
    assert {"torch_attnkit.cuda.other", "torch_attnkit.cuda.sm100.fast"} <= reached("torch_attnkit.kernel") - of_f


MEANING = {
    "torch_attnkit.kernel": """
from torch_attnkit.cuda import tiles
from torch_attnkit.cuda.other import Tile

SIZE = 4


def even(n: int):
    return n == 0 or odd(n - 1)


def odd(n: int):
    return n != 0 and even(n - 1)


def kernel(x: Tile) -> int:
    return tiles.load(x, SIZE) + even(SIZE)
""",
    "torch_attnkit.cuda.other": "class Tile:\n    rows: int = 8\n",
}


def meaning(package, changes=None, rename=()):
    sources = SOURCES | MEANING | (changes or {})
    for old, new in rename:
        sources = {name.replace(old, new): text.replace(old, new) for name, text in sources.items()}
    clear = digest._meanings.clear
    clear()
    found = package(sources, function=digest.of_meaning, names=("torch_attnkit.kernel", "kernel"))
    clear()
    return found


@pytest.mark.parametrize(
    "rename", [("SIZE", "ROWS"), ("tiles", "blocks"), ("load", "fetch"), ("Tile", "Block"), ("odd", "uneven")]
)
def test_what_things_are_called_changes_no_meaning(package, rename):
    assert meaning(package, rename=[rename]) == meaning(package)


@pytest.mark.parametrize(
    ("module", "old", "new"),
    [
        ("torch_attnkit.kernel", "SIZE = 4", "SIZE = 5"),
        ("torch_attnkit.kernel", "n != 0", "n > 0"),
        ("torch_attnkit.cuda.tiles", "return x", "return x + 1"),
    ],
)
def test_what_things_do_changes_the_meaning(package, module, old, new):
    text = (SOURCES | MEANING)[module]
    assert old in text and meaning(package, {module: text.replace(old, new)}) != meaning(package)


def test_a_meaning_is_the_same_whatever_was_asked_for_before(package):
    first = meaning(package)
    digest._meanings.clear()
    package(SOURCES | MEANING, function=digest.of_meaning, names=("torch_attnkit.kernel", "odd", "even"))
    assert package(SOURCES | MEANING, function=digest.of_meaning, names=("torch_attnkit.kernel", "kernel")) == first


def test_metal_texts_count_with_their_headers_and_without_comments(tmp_path, monkeypatch):
    (tmp_path / "metal" / "include" / "attnkit").mkdir(parents=True)
    source, header = tmp_path / "metal" / "x.metal", tmp_path / "metal" / "include" / "attnkit" / "y.h"
    monkeypatch.setattr(paths, "csrc", lambda: tmp_path)

    def of(text, included="int f();"):
        source.write_text(text)
        header.write_text(included)
        digest.of_metal.cache_clear()
        return digest.of_metal("x")

    text = '#include "attnkit/y.h"\nkernel void k() { f(); }'
    assert of(text + " // why\n/* a\nb */") == of(text)
    assert of(text.replace("f()", "g()")) != of(text)
    assert of(text, "int f(int);") != of(text)
    assert of('#define A "// no comment"\n' + text) != of('#define A "// another"\n' + text)
    digest.of_metal.cache_clear()


def test_rows_reach_every_kernel_that_they_ask_for():
    """Else evidence would stay what it is when that kernel changes. Of each row a case in the middle, and the last."""
    asked = 0
    for op, index, row, arch in support():
        if arch.startswith("sm"):
            reached = digest.reach(*op.entries(row), arch=arch)
            found = parity.cases(op, index, arch, covering=True)
            for case in {found[len(found) // 2], found[-1]}:
                with parity.ShapesOnly():
                    call = parity.bound(op, *parity.arguments(case))
                with compile.recording() as requests:
                    op.build(row, call, Target(arch, simulated=True))
                asked += len(requests)
                for request in requests:
                    assert digest.reach(f"{request.module}:{request.trace}", arch=arch) <= reached, case.id
    assert asked > 100


def test_rows_reach_their_kernels_and_no_other_archs():
    for op, _, row, arch in support():
        if arch.startswith("sm"):
            seen = digest.reach(*op.entries(row), arch=arch)
            assert any(n.endswith(("kernel", "decode.mma", "routing.table")) for n in seen), (op.name, arch)
            assert not any(".sm100." in n for n in seen if arch == "sm90"), (op.name, arch)
            assert not any(n.startswith("torch_attnkit.core") for n in seen), (op.name, arch)


def test_a_simulator_counts_its_own_target_alone(tmp_path, monkeypatch):
    """What a table says of another GPU changes no row's evidence; what is no table's counts for all."""
    python, cpp = tmp_path / "targets.py", tmp_path / "sim" / "ptx" / "target.cpp"
    cpp.parent.mkdir(parents=True)

    def of(arch, ours=1, other=1, code=1):
        python.write_text(f"GPUS = {{'sm90': {ours}, 'sm120': {other}}}\nCODE = {{'sum': {code}}}\n")
        cpp.write_text(
            f'T kTargets[] = {{\n    {{"sm_90", {ours}}},\n    {{"sm_120", {other}}},\n}};\nint code = {code};'
        )
        for function in CACHED:
            function.cache_clear()
        return digest.of_simulator("ptx", arch)

    with monkeypatch.context() as patch:
        patch.setattr(digest, "_modules", lambda: {"torch_attnkit.sim.ptx.targets": python})
        patch.setattr(paths, "csrc", lambda: tmp_path)
        assert of("sm90") == of("sm90", other=2) != of("sm90", ours=2)
        assert of("sm120") == of("sm120", ours=2) != of("sm120", other=2)
        assert len({of("sm90"), of("sm90", code=2), of("sm120"), of("sm120", code=2)}) == 4
    for function in CACHED:
        function.cache_clear()
