"""The bench of vLLM without vLLM: models and their weights, the float32 judge, and what records become."""

from __future__ import annotations

import json
import math
import types

import pytest
import torch
import transformers
import typer

from bench.serve import __main__ as serve
from bench.serve import judge, load, profiled, served, table
from bench.serve.models import MODELS, Model, bytes_of, is_expert

CPU = torch.device("cpu")
TINY = [name for name in MODELS if name.endswith("tiny")]
BILLIONS = {"gpt-oss-20b": 20.9, "qwen3-8b": 8.19, "llama-3-8b": 8.03}


def whole(model: Model):
    """transformers' own model in float32 with the weights that are drawn."""
    made = getattr(transformers, f"{model.family}ForCausalLM")._from_config(
        model.config(), dtype=torch.float32, attn_implementation="eager"
    )
    made.load_state_dict({name: t.float() for name, t in model.checkpoint(CPU, packed=False)}, strict=True)
    return made.eval()


@pytest.mark.parametrize(("name", "billions"), BILLIONS.items())
def test_models_have_the_published_sizes(name, billions, tmp_path):
    model = Model(name)
    assert sum(map(math.prod, model.shapes().values())) / 1e9 == pytest.approx(billions, rel=0.005)
    model.save(tmp_path, packed=True)
    written = json.loads((tmp_path / "config.json").read_text())
    assert ("quantization_config" in written) == model.mxfp4
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
    dense, again = (dict(model.checkpoint(CPU, packed=False)) for _ in range(2))
    assert all(torch.equal(dense[n], again[n]) for n in dense)
    assert {n: tuple(t.shape) for n, t in dense.items()} == model.shapes()
    packed = dict(model.checkpoint(CPU, packed=True))
    for n in dense:
        if is_expert(n):
            read = torch.ops.attnkit.mxfp4_dequantize(packed[f"{n}_blocks"].flatten(-2), packed[f"{n}_scales"])
            assert torch.equal(read.transpose(1, 2), dense[n])
            assert float(dense[n].float().std()) == pytest.approx(dense[n].shape[1] ** -0.5, rel=0.4)
        else:
            assert torch.equal(packed[n], dense[n])


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
    steps = served.Steps(began=0.0, ends=[1.0, 2.0, 2.5, 2.75, 3.25, 4.0], requests=[1, 2, 2, 2, 2, 1], tokens=10)
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
    written = served.arguments(run)
    assert written["attention_config"] == {"backend": "CUSTOM"} and written["quantization"] == "attnkit_mxfp4"
    assert written["max_model_len"] == run.served.longest > run.load.long.prompt
    run = load.Run("llama-3-tiny", "attnkit", "there", "cpu", parts=("behind",), kv_cache="fp8")
    written = served.arguments(run)
    assert written["kv_cache_dtype"] == "fp8" and written["max_model_len"] > run.load.behind.prompt


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
