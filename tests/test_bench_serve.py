"""The bench of vLLM without vLLM: models and their weights, the float32 judge, and what records become."""

from __future__ import annotations

import dataclasses
import json
import math
import types

import pytest
import torch
import transformers
import typer

from bench.serve import __main__ as serve
from bench.serve import judge, load, packed, profiled, sameness, served, table
from bench.serve.models import MODELS, Model, bytes_of, is_expert

CPU = torch.device("cpu")
TINY = [name for name in MODELS if name.endswith("tiny")]
BILLIONS = {"gpt-oss-20b": 20.9, "qwen3-8b": 8.19, "qwen3-30b-a3b": 30.5, "llama-3-8b": 8.03}


def whole(model: Model):
    """transformers' own model in float32 with the weights that are drawn."""
    made = getattr(transformers, f"{model.family}ForCausalLM")._from_config(
        model.config(), dtype=torch.float32, attn_implementation="eager"
    )
    weights = {name: model.generate(name, shape, CPU).float() for name, shape in model.shapes().items()}
    made.load_state_dict(weights, strict=True)
    return made.eval()


@pytest.mark.parametrize(("name", "billions"), BILLIONS.items())
def test_models_have_the_published_sizes(name, billions, tmp_path):
    model = Model(name)
    assert sum(map(math.prod, model.shapes().values())) / 1e9 == pytest.approx(billions, rel=0.005)
    model.save(tmp_path, packed=True)
    written = json.loads((tmp_path / "config.json").read_text())
    assert ("quantization_config" in written) == (model.packing is not None)
    assert written["architectures"] == [f"{model.family}ForCausalLM"]
    read = transformers.AutoConfig.from_pretrained(tmp_path)
    assert read.rope_parameters == model.config().rope_parameters


def test_a_shorter_model_and_longer_sequences():
    model = Model("llama-3-8b", layers=2, longest=33000)
    assert model.config().num_hidden_layers == 2 and model.config().max_position_embeddings == 33000
    weights, keys = bytes_of(Model("gpt-oss-20b"))
    assert weights / 1e9 == pytest.approx(13.8, rel=0.01)  # as the files of the checkpoint
    assert keys == 12 * 2 * 8 * 64 * 2


@pytest.mark.parametrize("name", TINY)
def test_weights_follow_from_names(name):
    """The same ones each time; packed experts are the numbers of the others."""
    model = Model(name)
    dense, again = ({n: model.generate(n, s, CPU) for n, s in model.shapes().items()} for _ in range(2))
    assert all(torch.equal(dense[n], again[n]) for n in dense)
    published = dict(model.checkpoint(CPU, packed=True))
    for n in dense:
        if is_expert(n):
            inner = dense[n].shape[1 if model.packing == packed.MXFP4 else 2]
            assert torch.equal(READ[model.packing](n, published), dense[n])
            assert float(dense[n].float().std()) == pytest.approx(inner**-0.5, rel=0.4)
        else:
            assert torch.equal(published[n], dense[n])


def read_mxfp4(name: str, published: dict) -> torch.Tensor:
    """Experts of GPT-OSS by the op that unpacks them."""
    read = torch.ops.attnkit.mxfp4_dequantize(published[f"{name}_blocks"].flatten(-2), published[f"{name}_scales"])
    return read.transpose(1, 2)


def read_nvfp4(name: str, published: dict) -> torch.Tensor:
    """Experts one by one by the op that unpacks them: gate above up."""
    home, _, kind = name.rpartition(".")
    parts = ("gate_proj", "up_proj") if kind == "gate_up_proj" else ("down_proj",)

    def read(e: int, part: str) -> torch.Tensor:
        codes, scales, factor, _ = (
            published[f"{home}.{e}.{part}.{key}"] for key in ("weight", "weight_scale", "weight_scale_2", "input_scale")
        )
        return torch.ops.attnkit.nvfp4_dequantize(codes, scales.view(torch.uint8), 1 / factor)

    count = sum(n.startswith(home) and n.endswith("down_proj.weight") for n in published)
    return torch.stack([torch.cat([read(e, part) for part in parts]) for e in range(count)])


READ = {packed.MXFP4: read_mxfp4, packed.NVFP4: read_nvfp4}


def test_experts_that_are_not_packed_are_named_one_by_one():
    """On a CPU vLLM loads the matrices of Qwen3-MoE as its checkpoints have them."""
    model = Model("qwen3-moe-tiny", layers=1)
    found = dict(model.checkpoint(CPU, packed=False))
    home = "model.layers.0.mlp.experts"
    whole_one = model.generate(f"{home}.gate_up_proj", model.shapes()[f"{home}.gate_up_proj"], CPU)
    for e in (0, 7):
        both = torch.cat([found[f"{home}.{e}.{part}.weight"] for part in ("gate_proj", "up_proj")])
        assert torch.equal(both, whole_one[e])


def answers(model: Model, asked: load.Load) -> dict:
    """What a case would say that is the whole model in float32."""
    made, vocabulary = whole(model), model.sizes["vocab_size"]
    given = load.texts(asked.given, vocabulary, 2)
    logs = [made(torch.tensor([text])).logits[0].log_softmax(-1) for text in given]
    found: dict = {"generated": [], "given": [[float(row[t]) for row, t in zip(x, text[1:], strict=False)]
                                              for x, text in zip(logs, given, strict=True)]}  # fmt: skip
    for prompt in load.texts(asked.judged, vocabulary, 1):
        text, logprobs = list(prompt), []
        for _ in range(asked.judged_new):
            row = made(torch.tensor([text])).logits[0, -1].log_softmax(-1)
            values, tokens = row.topk(5)
            logprobs.append({str(t): v for t, v in zip(tokens.tolist(), values.tolist(), strict=True)})
            text.append(int(tokens[0]))
        found["generated"].append({"tokens": text[len(prompt) :], "logprobs": logprobs})
    return found


@torch.no_grad()
@pytest.mark.parametrize("name", TINY)
def test_the_judge_is_the_whole_model(name):
    """Layer by layer the log-probabilities of transformers' model; one that is off is found off by as much."""
    model, asked = Model(name), load.Load(judged=(5, 40), judged_new=3, given=(33, 50))
    right = answers(model, asked)
    wrong = json.loads(json.dumps(right))
    wrong["given"][0][7] += 0.5
    wrong["generated"][1]["logprobs"][2] = {t: x - 0.25 for t, x in wrong["generated"][1]["logprobs"][2].items()}
    found = judge.judge(model, asked, {"right": right, "wrong": wrong}, CPU)
    assert found["right"]["given"]["max"] < 1e-4 and found["right"]["generated"]["max"] < 1e-4
    assert found["right"]["first"] == found["right"]["places"] == 6
    assert found["right"]["given"]["count"] == 81 and found["right"]["generated"]["count"] == 30
    assert found["wrong"]["given"]["max"] == pytest.approx(0.5, abs=1e-3)
    assert found["wrong"]["generated"]["max"] == pytest.approx(0.25, abs=1e-3)


def test_steps_count_where_all_requests_decode():
    steps = served.Steps(
        began=0.0, ends=[1.0, 2.0, 2.5, 2.75, 3.25, 4.0], requests=[1, 2, 2, 2, 2, 1], texts={"request-0": [0] * 10}
    )
    assert steps.whole(2) == [0.5, 0.25, 0.5]
    written = served.decoding(steps, 2)
    assert (written["steps"], written["ms"], written["total_s"]) == (3, 500.0, 4.0)
    assert written["tokens_s"] == pytest.approx(2 / (1.25 / 3))


def test_cases_and_what_is_left_out():
    names, why = load.cases_of(Model("qwen3-8b"), "cuda", [])
    assert names == ["vllm", "attnkit", "vllm-triton"] and list(why) == ["attnkit-attention"]
    names, why = load.cases_of(Model("gpt-oss-tiny"), "cpu", [])
    assert names == ["vllm", "attnkit", "attnkit-attention"] and list(why) == ["vllm-triton"]
    with pytest.raises(typer.BadParameter, match="--parts has speed, accepted: decode, single"):
        serve.chosen("parts", "decode,speed", load.PARTS)
    run = load.Run("gpt-oss-tiny", "attnkit", "there", "cpu", parts=("long",))
    assert load.Run.of(run.text()) == run
    assert run.packed and not load.Run("gpt-oss-tiny", "vllm", "there", "cpu").packed
    assert served.arguments(load.Run("qwen3-moe-tiny", "attnkit", "there", "cpu"))["quantization"] == "attnkit_nvfp4"
    written = served.arguments(run)
    assert written["attention_config"] == {"backend": "CUSTOM"} and written["quantization"] == "attnkit_mxfp4"
    assert written["max_model_len"] == run.served.longest > run.load.long.prompt
    run = load.Run("llama-3-tiny", "attnkit", "there", "cpu", parts=("behind",), kv_cache="fp8")
    written = served.arguments(run)
    assert written["kv_cache_dtype"] == "fp8" and written["max_model_len"] > run.load.behind.prompt


def test_cases_that_are_asked_for():
    names, why = load.cases_of(Model("llama-3-8b"), "cpu", ["attnkit-drafts", "attnkit-invariant"])
    assert names == ["attnkit-drafts"] and why == {"attnkit-invariant": "VLLM_BATCH_INVARIANT is for GPUs"}
    run = load.Run("llama-3-8b", "attnkit-invariant-drafts", "there", "cuda")
    written = served.arguments(run)
    assert written["speculative_config"]["num_speculative_tokens"] == run.load.drafts
    assert written["compilation_config"]["cudagraph_capture_sizes"][-1] == 64 * (1 + run.load.drafts)
    variables = served.environment(run)
    assert variables["VLLM_BATCH_INVARIANT"] == "1" and variables["VLLM_PLUGINS"] == "torch_attnkit"
    assert served.environment(load.Run("llama-3-8b", "vllm", "there", "cuda"))["VLLM_BATCH_INVARIANT"] == "0"
    assert [load.without_drafts(name) for name in ("vllm-drafts", "attnkit-invariant-drafts", "attnkit")] == [
        "vllm", "attnkit-invariant", None,
    ]  # fmt: skip


def test_others_have_many_lengths():
    lengths = load.spread(56, 1500)
    assert len(set(lengths)) == 56 and min(lengths) == 1 and max(lengths) == 1500
    assert 0.4 < sum(lengths[:28]) / sum(lengths) < 0.6  # as many tokens before as behind


def test_bits_that_differ_are_counted():
    one = {"prompt": [-1.0, -2.0], "tokens": [5, 6], "likeliest": [{5: -0.5, 7: -1.0}, {6: -0.25, 8: -3.0}]}
    other = {"prompt": [-1.0, -2.0 + 2**-51], "tokens": [5, 8], "likeliest": [{5: -0.5, 7: -1.0}, {8: -0.2, 6: -0.3}]}
    assert sameness.differing([one], [one]) == {
        "requests": 1, "prompt": 2, "prompt_differ": 0, "tokens": 2, "tokens_differ": 0, "likeliest_differ": 0,
        "largest": 0.0,
    }  # fmt: skip
    found = sameness.differing([one, one], [one, other])
    assert (found["prompt_differ"], found["tokens_differ"], found["likeliest_differ"]) == (1, 1, 1)
    assert found["largest"] == pytest.approx(2.8)
    with pytest.raises(ValueError):  # a text that ends early is no equal one
        sameness.differing([one], [one | {"tokens": [5]}])


def test_texts_with_drafts_beside_those_without():
    assert sameness.of_drafts([[1, 2, 3], [4, 5, 6]], [[1, 2, 3], [4, 9, 6]]) == {
        "requests": 2, "equal": 1, "tokens": 6, "same": 4,
    }  # fmt: skip
    steps = served.Steps(began=0.0, texts={"request-10": [3], "request-9": [1, 2]})
    assert steps.tokens == 3 and steps.in_order() == [[1, 2], [3]]
    part = {"tokens_s": 100.0, "tokens_a_step": 1.0, "taken": 0, "tokens": 6, "texts": [[1, 2, 3], [4, 9, 6]]}
    drafted = part | {"taken": 2, "texts": [[1, 2, 3], [4, 5, 6]]}
    records = {"attnkit": {"parts": {"repeated": part}}, "attnkit-drafts": {"parts": {"repeated": drafted}}}
    made = table.drafts("a model", records)
    assert [c[0] for c in cells(made)] == ["attnkit-drafts", "2 of 6", "1 of 2", "4 of 6"]
    assert table.drafts("a model", {"attnkit-drafts": records["attnkit-drafts"]}) is None
    assert serve.parts_of(records["attnkit"])["repeated"].keys() == part.keys() - {"texts"}


def test_a_table_of_bits():
    found = sameness.differing([], []) | {"prompt": 9, "largest": 0.5}
    made = table.invariance("a model", {"attnkit": RECORD | {"parts": {"invariant": {"among others": found}}}})
    assert [c[0] for c in cells(made)] == ["attnkit", "among others", "9", "0", "0", "0", "0", "0.5"]
    assert table.invariance("a model", {"attnkit": RECORD}) is None


RECORD = {
    "start_s": 20.0, "engine": {"attention": ["FLASH_ATTN"], "graphs": "FULL_AND_PIECEWISE"},
    "parts": {"decode": {"tokens_s": 1000.0, "ms": 8.0}, "prefill": {"tokens_s": 5e4}},
    "facts": {"device": "A GPU", "python": "3.12", "versions": {"torch": "2.11", "vllm": "0.32.0"}},
}  # fmt: skip


def cells(made) -> list[list[str]]:
    return [list(column.cells) for column in made.columns]


def test_a_table_has_ratios_to_vllm():
    ours = RECORD | {"parts": {"decode": {"tokens_s": 1500.0, "ms": 4.0}}}
    made = table.speed("a model", {"vllm": RECORD, "attnkit": ours})
    columns = [str(c.header) for c in made.columns]
    assert columns == ["case", "attention", "graphs", "start s", "decode tok/s", "decode ms a step", "prefill tok/s"]
    assert cells(made)[4:] == [["1000", "1500 (1.50)"], ["8.00", "4.00 (2.00)"], ["50000", "-"]]
    assert cells(table.speed("alone", {"attnkit": ours}))[4] == ["1500"]
    assert table.heading({"vllm": RECORD}) == "A GPU: torch 2.11, vllm 0.32.0; Python 3.12"
    answers = {"given": {"mean": 0.01, "max": 0.1}, "generated": {"mean": 0.02, "max": 0.2}, "first": 3, "places": 4}
    assert [c[0] for c in cells(table.distances("a model", {"vllm": answers}))[1:]] == [
        "0.01", "0.1", "0.02", "0.2", "3 of 4",
    ]  # fmt: skip


def event(key, on, count, us=0.0):
    return types.SimpleNamespace(
        key=key, device_type=getattr(torch.autograd.DeviceType, on), count=count, self_device_time_total=us,
        is_user_annotation=False,
    )  # fmt: skip


def test_a_profile_counts_kernels_and_launches():
    events = [
        event("void at::native::add<float>(float*, int)", "CUDA", 20, 100.0), event("gemm", "CUDA", 10, 900.0),
        event("cudaLaunchKernelExC", "CPU", 30), event("cuLaunchKernelEx", "CPU", 20),
        event("cudaGraphLaunch", "CPU", 10), event("cudaMemcpyAsync", "CPU", 70),
    ]  # fmt: skip
    found = profiled.summary(types.SimpleNamespace(key_averages=lambda: events), 10, 0.003)
    assert found | {"top": []} == {
        "steps": 10, "wall_ms": 3.0, "gpu_ms": 0.1, "kernels": 3.0, "launches": 5.0, "graph_launches": 1.0, "top": [],
    }  # fmt: skip
    assert [k["name"] for k in found["top"]] == ["gemm", "add<float>"]
    made = table.profiles("a model", {"vllm": RECORD | {"profile": {"decode": found}}, "attnkit": RECORD})[0]
    assert cells(made)[1][-2:] == ["90 us, 1 x gemm", "10 us, 2 x add<float>"]


def test_a_case_that_may_not_end_is_left_out(tmp_path, monkeypatch):
    """One runs, one fails and leaves what it had, and none is begun without time for it."""
    codes = {"vllm": 0, "attnkit": None}
    began = []

    def child(command, log, limit):
        run = load.Run.of(command[1])
        began.append((run.case, limit))
        log.write_text("words")
        (tmp_path / f"{run.case}.json").write_text(json.dumps(RECORD))
        return codes[run.case]

    monkeypatch.setattr(serve, "child", child)
    run = load.Run("gpt-oss-tiny", "", str(tmp_path), "cpu", judge=True)
    now = serve.time.perf_counter()
    records, failed = serve.served(run, ["vllm", "attnkit"], now + 200)
    assert list(records) == ["vllm", "attnkit"] and failed == ["attnkit"]
    assert all(limit <= 200 - serve._JUDGE for _, limit in began)
    began.clear()
    assert serve.served(run, ["vllm"], now + serve._JUDGE + serve._LEAST - 1) == ({}, []) and not began


def test_a_baseline_keeps_the_cases_that_did_not_run(tmp_path, monkeypatch):
    monkeypatch.setattr(serve, "ROOT", tmp_path)
    run = load.Run("qwen3-8b", "", str(tmp_path), "cuda")
    serve.merge(run, {"vllm": RECORD | {"judged": {}}, "attnkit": RECORD}, "python -m bench.serve qwen3-8b")
    serve.merge(run, {"attnkit": RECORD | {"start_s": 1.0}, "vllm-triton": {"parts": {}}}, "another")
    written = json.loads((tmp_path / "bench/baselines/a-gpu/serve-qwen3-8b.json").read_text())
    assert list(written["cases"]) == ["vllm", "attnkit"] and "judged" not in written["cases"]["vllm"]
    assert written["cases"]["attnkit"]["start_s"] == 1.0
    assert [case["command"] for case in written["cases"].values()] == ["python -m bench.serve qwen3-8b", "another"]
    serve.merge(dataclasses.replace(run, layers=12, kv_cache="fp8"), {"vllm": RECORD}, "of some layers")
    assert (tmp_path / "bench/baselines/a-gpu/serve-qwen3-8b-12-layers-fp8.json").exists()
