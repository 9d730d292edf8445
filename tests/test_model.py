"""`harness model`: the model is GPT-2, its runs differ by the attention alone, and what goes wrong is a cell."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import harness.model
from common import port_names
from harness import attend as attention_by_name
from harness.checkpoint import Checkpoint
from harness.cli import main
from harness.environment import CPU
from harness.errors import UsageError
from harness.gpt2 import GPT2, GPT2Config
from harness.model import ON_CPU, ON_GPU, ModelRequest, contestants, fault_of, model
from harness.model_tables import model_tables
from harness.published import with_tables
from harness.reader import read_records
from harness.report.page import page
from harness.report.runs import read_runs
from harness.schema import record_fault
from harness.session import Session
from harness.tables import Table
from harness.text import BYTES, drawn, load_text, windows
from harness.training import Outcome, Plan, run_model
from reference.port import ReferencePort

from .report_records import models
from .test_imports import blocking, fresh

TINY = GPT2Config(layers=1, heads=2, width=32, context=16)
INTERPRETED = pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU Triton does not run on the CPU")
PLAIN = ("sdpa_flash", "sdpa_math", "naive", "reference")


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness.model, "ON_CPU", replace(ON_CPU, config=TINY, tokens=64, steps=3))


@pytest.fixture(scope="module")
def book(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "book.txt"
    path.write_text("It was the best of times, it was the worst of times. " * 20)
    return path


def plan(mode: str = "train", *, steps: int = 2, config: GPT2Config = TINY, **changed: Any) -> Plan:
    generator = torch.Generator().manual_seed(0)
    batches = torch.randint(config.vocabulary, (steps, 2, config.context + 1), generator=generator)
    return replace(Plan(mode, config, None, 0, batches, torch.device("cpu")), **changed)  # type: ignore[arg-type]


def run(book: Path, *names: str, **options: Any) -> tuple[int, list[dict[str, Any]]]:
    """The command in this process: its status, and its records."""
    path = book.with_suffix(".jsonl")
    options = {"text": book, "json": path, "isolated": False} | options
    status = model(ModelRequest(impls=(), contestants=names or PLAIN, **options), CPU)
    return status, read_records(path, ("model",))


def by_name(records: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {record["contestant"]: record for record in records if not record["compiled"]}


def test_the_default_model_is_the_124m_one() -> None:
    with torch.device("meta"):
        made = GPT2(GPT2Config(), "naive")
    assert sum(p.numel() for p in made.parameters()) == 124_439_808
    shapes = {name: tuple(x.shape) for name, x in made.state_dict().items()}
    assert shapes["transformer.h.11.attn.c_attn.weight"] == (768, 2304)
    assert shapes["lm_head.weight"] == shapes["transformer.wte.weight"] == (50257, 768)


def test_it_computes_what_transformers_does_with_the_same_weights() -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 32, "n_positions": 16, "vocab_size": 50257}
    theirs = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).eval()
    ours = GPT2(replace(TINY, layers=2), "naive")
    ours.load_state_dict(theirs.state_dict())
    tokens = torch.randint(50257, (2, 17))
    logits = theirs(tokens[:, :-1]).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    torch.testing.assert_close(ours(tokens[:, :-1], tokens[:, 1:]), loss)


@pytest.mark.parametrize("impl", ["naive", "sdpa_flash", "reference", pytest.param("triton", marks=INTERPRETED)])
def test_every_attention_gives_the_same_losses_and_so_does_the_compiled_graph(impl: str) -> None:
    theirs = run_model(plan(), "sdpa_math", False)
    ours, compiled = run_model(plan(), impl, False), run_model(plan(), impl, True)
    assert not fault_of(ours, theirs, "train")
    assert not fault_of(compiled, ours, "train")
    for name in ("losses", "grad_norms"):
        assert getattr(compiled, name) == pytest.approx(getattr(ours, name), rel=2**-9)
    assert (ours.step_ms, ours.peak_bytes) == ((), None)  # a CPU has neither speed nor memory


def test_a_run_is_repeatable_and_every_contestant_begins_with_the_same_weights() -> None:
    first, again, other = (run_model(plan(seed=seed), "naive", False) for seed in (0, 0, 1))
    assert first == again
    assert first.losses[0] != other.losses[0]
    assert first.losses[1] != run_model(plan("eval"), "naive", False).losses[1]  # it has learned


def test_an_evaluation_is_told_beside_pytorchs(book: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, records = run(book)
    assert status == 0
    assert [r["contestant"] for r in records] == list(PLAIN)
    assert all(len(r["losses"]) == r["steps"] == 2 and not r["grad_norms"] for r in records)
    assert [r["sources"] is None for r in records] == [True, True, True, False]
    out = capsys.readouterr().out
    assert "GPT-2 with 1 layer, width 32 (1.6M parameters), loss on 64 tokens, batch 2, context 16, the CPU" in out
    assert "The row of SDPA math is the noise floor" in out
    assert "tokens/s" not in out


def test_a_training_is_told_step_by_step(book: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, records = run(book, "sdpa_flash", "sdpa_math", "naive", mode="train", compiles=True)
    assert status == 0
    assert [(r["contestant"], r["compiled"]) for r in records] == [
        (name, compiled) for name in ("sdpa_flash", "sdpa_math", "naive") for compiled in (False, True)
    ]
    assert all(len(r["losses"]) == len(r["grad_norms"]) == 3 for r in records)
    out = capsys.readouterr().out
    for title in ("3 training steps", "Loss by step", "Compiled beside eager", "naive, compiled", "largest |Δ norm|"):
        assert title in out


@INTERPRETED
def test_triton_runs_in_its_interpreter_in_a_process_apart(book: Path) -> None:
    status, records = run(book, "sdpa_flash", "sdpa_math", "triton", tokens=16, batch=1, isolated=True)
    assert status == 0
    assert by_name(records)["triton"]["verdict"] == "pass"


def broken(kind: str) -> Any:
    def naive(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, problem: object) -> torch.Tensor:
        if kind == "memory":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 48 GiB")
        if kind == "raises":
            raise RuntimeError("an illegal address")
        return v * (30 if kind == "strays" else torch.nan)

    return naive


@pytest.mark.parametrize(
    ("kind", "status", "words"),
    [
        ("memory", 0, "out of memory"),
        ("raises", 1, "FAIL: it raised RuntimeError: an illegal address"),
        ("strays", 1, "FAIL: its gradient norm strays at step 1"),
        ("nan", 1, "FAIL: its loss is nan at step 1"),
    ],
)
def test_what_goes_wrong_costs_its_own_row(
    kind: str, status: int, words: str, book: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(attention_by_name, "naive_attention", broken(kind))
    found, records = run(book, mode="train", steps=1)
    assert found == status
    assert {name for name, r in by_name(records).items() if r["verdict"] != "pass"} == {"naive"}
    assert words in capsys.readouterr().out


def test_what_fails_its_own_check_is_not_run(book: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = ReferencePort._forward

    def wrong(self: ReferencePort, *arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        o, lse = right(self, *arguments)
        return o * 2, lse

    monkeypatch.setattr(ReferencePort, "_forward", wrong)
    status, records = run(book)
    ours = by_name(records)["reference"]
    assert (status, ours["verdict"], ours["losses"]) == (1, "fail", [])
    assert ours["reason"].startswith("its check failed, forward: o: error")


def test_a_port_that_cannot_run_here_is_no_row_and_an_error_only_when_it_was_asked_for(
    book: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cannot(self: Session, name: str) -> str:
        return f"the {name} port cannot run here: no card" if name == "cute" else ""

    monkeypatch.setattr(Session, "_probe", cannot)
    request = ModelRequest(impls=(), contestants=(*PLAIN, "cute"), text=book, isolated=False)
    assert (model(request, CPU, all_asked=False), model(request, CPU)) == (0, 2)


def test_a_port_that_refuses_the_model_says_why_and_is_an_error_only_when_it_was_asked_for(
    book: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ReferencePort, "unsupported", lambda self, problem, target: "no heads of 16 today")
    request = ModelRequest(impls=(), contestants=PLAIN, text=book, isolated=False)
    monkeypatch.setattr(Session, "_probe", lambda self, name: "")
    assert (model(request, CPU, all_asked=False), model(request, CPU)) == (0, 2)
    assert "no heads of 16 today" in capsys.readouterr().out


def test_who_is_compared() -> None:
    assert contestants("triton,sdpa", CPU) == ("sdpa_flash", "sdpa_math", "triton")
    assert contestants("all", CPU) == ("sdpa_flash", "sdpa_math", "naive", *port_names())
    with pytest.raises(UsageError, match=r"--impl must be one of all, sdpa, naive, .*did you mean triton"):
        contestants("tritno", CPU)


def test_losses_that_no_order_of_adding_explains_are_a_fault() -> None:
    theirs = Outcome(losses=(10.0, 9.0), grad_norms=(4.0, 3.0))
    assert not fault_of(Outcome(losses=(10.05, 8.0), grad_norms=(4.02, 9.0)), theirs, "train")
    assert "its loss strays at step 1" in fault_of(Outcome(losses=(10.1, 9.0), grad_norms=(4.0, 3.0)), theirs, "train")
    assert "gradient norm strays" in fault_of(Outcome(losses=(10.0, 9.0), grad_norms=(4.1, 3.0)), theirs, "train")
    assert "strays at step 2" in fault_of(Outcome(losses=(10.0, 9.1)), theirs, "eval")
    assert not fault_of(Outcome(losses=(10.0,)), None, "eval")


def test_batches_are_windows_of_the_text(book: Path) -> None:
    text = load_text(book, None)
    assert (text.source, text.tokenizer) == ("book.txt", BYTES)
    batches = windows(text, 3, 2, 16)
    assert batches.shape == (3, 2, 17)
    assert torch.equal(batches.flatten(0, 1)[:, :-1].flatten(), text.tokens[: 3 * 2 * 16])
    assert torch.equal(batches.flatten(0, 1)[:, 1:].flatten(), text.tokens[1 : 3 * 2 * 16 + 1])
    assert bytes(batches[0, 0].tolist()) == book.read_bytes()[:17]
    some, same, other = (drawn(text, 3, 2, 16, seed) for seed in (0, 0, 1))
    assert torch.equal(some, same)
    assert not torch.equal(some, other)
    assert all(bytes(row.tolist()) in book.read_bytes() for row in some.flatten(0, 1))
    for short in (lambda: windows(text, 1, 1, 2000), lambda: drawn(text, 1, 1, 2000, 0)):
        with pytest.raises(UsageError, match=r"a context of 2000.* takes 2001 tokens, and book\.txt has 1060"):
            short()


def test_without_a_text_it_is_the_standard_library() -> None:
    text = load_text(None, None)
    assert len(text.tokens) > 1_700_000  # 200 steps of 8 sequences of 1024
    assert text.source == "Python's standard library"
    assert torch.equal(text.tokens, load_text(None, None).tokens)


@pytest.mark.parametrize("form", ["tokenizer.json", "vocab.json and merges.txt"])
def test_a_tokenizer_comes_from_a_folder(form: str, book: Path, tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed")
    made = tokenizers.ByteLevelBPETokenizer()
    made.train([str(book)], vocab_size=300, show_progress=False)
    if form == "tokenizer.json":
        made.save(str(tmp_path / form))
    else:
        made.save_model(str(tmp_path))
    text = load_text(book, tmp_path)
    assert len(text.tokens) < 1060
    assert made.decode(text.tokens.tolist()) == book.read_text()


def test_a_tokenizer_that_is_none_is_refused(book: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tokenizers", reason="tokenizers is not installed")
    with pytest.raises(UsageError, match=r"holds neither tokenizer\.json nor"):
        load_text(book, tmp_path)
    with pytest.raises(UsageError, match="cannot be read"):
        load_text(book, book)
    with pytest.raises(UsageError, match=r"cannot be read: No such file or directory$"):
        load_text(book, tmp_path / "none.json")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(UsageError, match="pip install tokenizers"):
        load_text(book, tmp_path)


def state(config: GPT2Config = TINY) -> dict[str, torch.Tensor]:
    made = GPT2(config, "naive")
    made.initialise(3)
    return {name: x.clone() for name, x in made.state_dict().items()}


def state_names() -> list[str]:
    with torch.device("meta"):
        return list(GPT2(TINY, "naive").state_dict())


def saved(folder: Path, tensors: dict[str, torch.Tensor], config: Any = None) -> Path:
    save_file = pytest.importorskip("safetensors.torch", reason="safetensors is not installed").save_file
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"n_head": 2} if config is None else config))
    return folder


@pytest.mark.parametrize("form", ["whole", "of the bare transformer"])
def test_weights_come_from_a_file_of_hugging_face(form: str, tmp_path: Path) -> None:
    tensors = state()
    if form != "whole":
        del tensors["lm_head.weight"]
        tensors = {name.removeprefix("transformer."): x for name, x in tensors.items()}
        tensors["h.0.attn.bias"] = torch.ones(1, 1, 16, 16)
    checkpoint = Checkpoint.open(saved(tmp_path, tensors))
    assert checkpoint.config == TINY
    loaded = GPT2(TINY, "naive")
    checkpoint.load(loaded)
    assert all(torch.equal(x, state()[name]) for name, x in loaded.state_dict().items())
    assert run_model(plan(checkpoint=checkpoint), "naive", False) == run_model(plan(seed=3), "naive", False)


def test_a_command_with_weights_names_them_and_keeps_to_their_context(book: Path, tmp_path: Path) -> None:
    folder = saved(tmp_path, state())
    status, records = run(book, weights=folder, context=8, tokens=16)
    assert status == 0
    assert records[0]["weights"]["source"] == f"{tmp_path.name}/model.safetensors"
    assert records[0]["problem"]["len_q"] == 8
    with pytest.raises(UsageError, match=r"--context 32: .* has embeddings for 16 positions"):
        run(book, weights=folder, context=32)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"transformer.h.0.mlp.c_fc.weight": torch.zeros(128, 32)}, r"must be \(32, 128\) and is \(128, 32\)"),
        ({"transformer.ln_f.bias": None}, "transformer.ln_f.bias must be .* and is not there"),
        ({"transformer.wte.weight": None}, "no wte.weight and wpe.weight"),
        ({"transformer.h.0.attn.q_norm.weight": torch.zeros(3)}, "it has transformer.h.0.attn.q_norm.weight"),
        ({"config": {"activation_function": "relu"}}, "activation_function must be gelu_new, got relu"),
        ({"config": {"n_head": 5}}, "does not go into 5 heads"),
        ({"config": {"n_head": "2"}}, "does not go into 2 heads"),
        ({"config": {}}, "a width of 32 does not go into heads of 64"),
        ({"config": []}, "config.json is no configuration"),
        ({"config": {"model_type": "llama", "n_head": 2}}, "model_type must be gpt2, got llama"),
        ({"transformer.wpe.weight": torch.zeros(0, 32)}, r"wpe.weight is \(0, 32\), without an element"),
        ({"transformer.h.0.ln_1.bias": torch.zeros(32, dtype=torch.int32)}, "ln_1.bias is of I32, no floating point"),
        ({name: None for name in state_names() if ".h." in name}, "it has no layers"),
        ({"head": torch.zeros(50257, 32)}, "is not the embedding of tokens"),
    ],
)
def test_weights_that_are_none_of_gpt2_are_refused(change: dict[str, Any], words: str, tmp_path: Path) -> None:
    tensors, config = state(), change.pop("config", None)
    if "head" in change:
        change = {"lm_head.weight": change["head"]}
    tensors = {name: x for name, x in (tensors | change).items() if x is not None}
    folder = saved(tmp_path, tensors, config)
    with pytest.raises(UsageError, match=words):
        Checkpoint.open(folder).load(GPT2(TINY, "naive"))


def test_heads_that_are_assumed_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = saved(tmp_path, state(replace(TINY, width=128)), {})
    assert Checkpoint.open(folder).config.heads == 2
    told = f"harness: no n_head beside {folder / 'model.safetensors'}: 2 heads of 64 are assumed\n"
    assert capsys.readouterr().err == told


def test_a_file_that_is_no_checkpoint_is_refused(book: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="no safetensors file, nor a folder"):
        Checkpoint.open(tmp_path)
    pytest.importorskip("safetensors", reason="safetensors is not installed")
    with pytest.raises(UsageError, match="cannot be read"):
        Checkpoint.open(book)
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(UsageError, match="pip install safetensors"):
        Checkpoint.open(book)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--impl", "flash"], "--impl must be one of all, sdpa"),
        (["--tokens", "100"], "--tokens must be a multiple of batch × context, which is "),
        (["--weights", "nowhere"], "--weights nowhere is no safetensors file"),
        (["--context", "99999999999"], "give a shorter --context or a longer --text"),
        (["--context", "99999999999", "--mode", "train"], "give a shorter --context or a longer --text"),
        (["--text", "nowhere.txt"], "--text nowhere.txt cannot be read"),
        (["--mode", "dream"], "dream"),
        (["--steps", "0"], "--steps"),
    ],
)
def test_wrong_usage_is_one_line_and_status_2(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["model", *arguments])
    assert stop.value.code == 2
    told = capsys.readouterr()
    assert words in told.err
    assert (told.out, told.err.count("\n")) == ("", 1)


def rows(table: Table) -> dict[str, dict[str, str]]:
    return {row[0]: dict(zip(table.columns, row, strict=True)) for row in table.rows}


def test_tables_tell_speed_and_memory_of_records_from_a_gpu() -> None:
    main_table, curves = model_tables(models())
    assert (
        main_table.title
        == "GPT-2 with 12 layers, width 768 (124M parameters), 30 training steps, batch 8, context 1024, NVIDIA H200"
    )
    found = rows(main_table)
    assert found["triton"]["tokens/s"] == "128,000"  # of 64 ms, the first steps left out
    assert found["triton"]["% of SDPA flash"] == "125.0"
    assert found["triton"]["largest |Δ loss|"] == "2.00e-04"
    assert found["SDPA efficient"]["largest |Δ norm|"] == "1.00e-03"
    assert found["triton"]["peak GB"] == "12.34"
    assert found["naive"]["verdict"] == "out of memory"
    assert "The row of SDPA efficient is the noise floor" in main_table.notes[0]
    assert curves.columns == ("step", "SDPA flash", "SDPA efficient", "triton")
    assert [row[0] for row in curves.rows] == ["1", "4", "7", "11", "14", "17", "20", "24", "27", "30"]
    (evaluated,) = model_tables(models("eval", steps=8))
    assert rows(evaluated)["triton"]["tokens/s"] == "128,000"
    assert rows(evaluated)["triton"]["Δ to SDPA flash"] == "+1.13e-04"


def test_a_training_shorter_than_what_is_left_out_has_no_speed() -> None:
    short = [r | {"steps": 5} | {k: r[k][:5] for k in ("losses", "grad_norms", "step_ms")} for r in models()]
    assert rows(model_tables(short)[0])["triton"]["tokens/s"] == "–"


def test_a_text_quotes_the_tables_of_records_of_models(tmp_path: Path) -> None:
    path = tmp_path / "model.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in models()))
    quoted = with_tables(f"<!-- records: {path} -->\na typed figure\n<!-- /records -->\n")
    assert "| triton | 10.80001 | 7.90020 |" in quoted
    assert "a typed figure" not in quoted
    assert with_tables(quoted) == quoted
    with pytest.raises(SystemExit) as stop:
        main(["tables", str(path)])
    assert stop.value.code == 0


def test_records_are_held_to_their_schema() -> None:
    record = models()[0]
    assert record_fault(record) is None
    assert record_fault(record | {"losses": [None]}) is not None
    assert record_fault({k: v for k, v in record.items() if k != "text"}) == "the record lacks text"


def test_the_report_draws_loss_curves_and_says_what_ran_out_of_memory(tmp_path: Path) -> None:
    path = tmp_path / "model.jsonl"
    strange = models()[2] | {"contestant": "cute", "verdict": "fail", "reason": "its loss is nan at step 3"}
    strange["losses"] = [*strange["losses"][:2], "nan", *strange["losses"][3:]]
    records = [*models(), strange, *models("eval", steps=8)]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    text = page(read_runs([path]))
    section = text.partition('<section id="model"')[2].partition("</section>")[0]
    assert section.count("<svg") == 2  # of the training
    assert "Loss by step" in section
    assert "SDPA efficient is the noise floor" in section
    assert "out of memory" in section
    assert "FAIL: its loss is nan at step 3" in section
    assert section.count('class="curve who-triton"') == 4
    lost = models()[0] | {"losses": []}
    path.write_text(json.dumps(lost) + "\n")
    with pytest.raises(UsageError, match="0 losses of 30 steps"):
        read_runs([path])


def test_without_transformers_registering_says_what_to_install() -> None:
    code = """
import common.transformers
try:
    common.transformers.register()
except common.Unsupported as reason:
    print(reason)
"""
    assert "pip install 'transformers>=5'" in fresh(blocking("transformers") + code).stdout


@pytest.mark.gpu
@pytest.mark.parametrize("impl", ["triton", "tilelang", "cute"])
def test_on_a_card_a_training_has_speed_and_memory(
    impl: str, book: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip({"triton": "triton", "tilelang": "tilelang", "cute": "cutlass"}[impl])
    monkeypatch.setattr(harness.model, "ON_GPU", replace(ON_GPU, config=GPT2Config(layers=2)))
    path = tmp_path / "x.jsonl"
    sizes = ["--steps", "12", "--batch", "1", "--context", "128", "--compile", "--text", str(book)]
    with pytest.raises(SystemExit) as stop:
        main(["model", "--impl", impl, "--mode", "train", "--json", str(path), *sizes])
    assert stop.value.code == 0
    for record in read_records(path, ("model",)):
        assert len(record["step_ms"]) == 11
        assert record["peak_bytes"] > record["model"]["parameters"] * 16  # weight, gradient and two moments
