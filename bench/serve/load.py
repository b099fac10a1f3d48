"""What is asked of a served model: which requests a part has, and the cases that are compared."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import NamedTuple

import torch

from .models import Model

PARTS = ("decode", "single", "prefill", "behind", "long", "repeated", "invariant")
USUAL = ("decode", "single", "prefill")


@dataclass(frozen=True)
class Case:
    """``backend`` of attention, None for vLLM's choice; ``experts``: FP4 experts by fp4_moe; ``invariant``:
    VLLM_BATCH_INVARIANT; ``drafts``: tokens are drafted from n-grams of the text."""

    backend: str | None = None
    experts: bool = False
    gpu: bool = False  # there alone
    invariant: bool = False
    drafts: bool = False

    @property
    def ours(self) -> bool:
        return self.backend == "CUSTOM"

    @property
    def usual(self) -> bool:
        """Whether it runs without being asked for."""
        return not (self.invariant or self.drafts)


_DRAFTS = "-drafts"
CASES = {
    "vllm": Case(),
    "attnkit": Case("CUSTOM", experts=True),
    "attnkit-attention": Case("CUSTOM"),
    "vllm-triton": Case("TRITON_ATTN", gpu=True),
    "vllm-drafts": Case(drafts=True),
    "attnkit-drafts": Case("CUSTOM", experts=True, drafts=True),
    # On a CPU our backend refuses the mode, and vLLM 0.32 does not start in it.
    "vllm-invariant": Case(gpu=True, invariant=True),
    "attnkit-invariant": Case("CUSTOM", experts=True, gpu=True, invariant=True),
    "attnkit-invariant-drafts": Case("CUSTOM", experts=True, gpu=True, invariant=True, drafts=True),
}


def without_drafts(case: str) -> str | None:
    """The case that differs from ``case`` by its drafts alone; None where it has none."""
    return case.removesuffix(_DRAFTS) if CASES[case].drafts else None


class Behind(NamedTuple):
    """Requests that decode behind long prompts, and tokens of each prompt."""

    requests: int
    prompt: int


class Repeated(NamedTuple):
    """Requests whose texts come to repeat themselves, for they choose among the first ``choices`` tokens of the
    vocabulary alone: what follows a token is then nearly a function of it, also where weights are drawn."""

    requests: int
    prompt: int
    new: int
    choices: int


@dataclass(frozen=True)
class Load:
    """Requests of the parts. Lengths are in tokens; ``new`` are tokens that a request generates."""

    requests: int = 64
    prompt: int = 1024
    new: int = 128
    new_alone: int = 64
    prefills: int = 32
    prefill: int = 4096
    behind: Behind = Behind(64, 8192)
    long: Behind = Behind(32, 32768)
    steps_behind: int = 32
    repeated: Repeated = Repeated(32, 256, 256, 32)
    drafts: int = 3  # tokens that a request's step may draft
    others: int = 56  # requests among which those of ``invariant`` are
    others_longest: int = 1500
    chunk: int = 8192  # tokens of a step at most
    longest: int = 8192  # of a sequence without the part ``long``
    judged: tuple[int, ...] = (17, 64, 129, 333, 640, 1000, 1500, 2000)
    judged_new: int = 32
    given: tuple[int, ...] = (257, 700, 1500)

    def new_behind(self, asked: Behind) -> int:
        """Tokens that the first request behind such a prompt may generate: prompts of the others are read meanwhile."""
        return asked.requests * (asked.prompt // self.chunk + 1) + 2 * self.steps_behind

    def max_model_len(self, parts: tuple[str, ...]) -> int:
        asked = [getattr(self, part) for part in ("behind", "long") if part in parts]
        return max([a.prompt + self.new_behind(a) for a in asked], default=self.longest)


TINY = Load(
    requests=4, prompt=40, new=12, new_alone=6, prefills=3, prefill=96, behind=Behind(3, 160), long=Behind(2, 320),
    steps_behind=4, repeated=Repeated(3, 20, 40, 8), others=4, others_longest=90, chunk=64, longest=256,
    judged=(5, 17, 40, 130), judged_new=12, given=(33, 90),
)  # fmt: skip


def load_of(name: str) -> Load:
    return TINY if name.endswith("tiny") else Load()


@dataclass(frozen=True)
class Run:
    """What a process is to do: all of it travels as JSON."""

    model: str
    case: str
    folder: str  # for configurations, records and logs
    device: str
    layers: int = 0
    parts: tuple[str, ...] = USUAL
    profile: bool = False
    judge: bool = False
    tensor_parallel: int = 1
    dtype: str = "bfloat16"
    eager: bool = False
    kv_cache: str = "auto"  # vLLM's word for the dtype of keys and values

    @property
    def load(self) -> Load:
        return load_of(self.model)

    @property
    def served(self) -> Model:
        return Model(self.model, self.layers, self.load.max_model_len(self.parts))

    @property
    def packed(self) -> bool:
        """Whether experts lie in FP4. vLLM's own kernels of it are for GPUs: on a CPU it gets the same numbers
        unpacked."""
        return self.served.packing is not None and (self.device != "cpu" or CASES[self.case].experts)

    def text(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def of(cls, text: str) -> Run:
        config = json.loads(text)
        return cls(**config | {"parts": tuple(config["parts"])})


def cases_of(model: Model, device: str, wanted: list[str]) -> tuple[list[str], dict[str, str]]:
    """The cases of ``wanted`` (all, if that is empty) that say something of the model here; why the others do not."""
    chosen, left_out = [], {}
    for name in wanted or [name for name, case in CASES.items() if case.usual]:
        if CASES[name].gpu and device == "cpu":
            what = "VLLM_BATCH_INVARIANT" if CASES[name].invariant else CASES[name].backend
            left_out[name] = f"{what} is for GPUs"
        elif name == "attnkit-attention" and model.packing is None:
            left_out[name] = "the same as attnkit, for no experts are in FP4"
        else:
            chosen.append(name)
    return chosen, left_out


def texts(lengths: tuple[int, ...], vocabulary: int, seed: int) -> list[list[int]]:
    """Random tokens, so many of each."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(vocabulary, (n,), generator=generator).tolist() for n in lengths]


def spread(count: int, longest: int) -> tuple[int, ...]:
    """Lengths of requests, long and short ones in turn."""
    return tuple(1 + (i * 7919 % count) * (longest - 1) // max(1, count - 1) for i in range(count))
