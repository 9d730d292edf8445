"""The ports as attention implementations of Hugging Face transformers: the same results as its `sdpa`, or a reason."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from common import Unsupported, port_names
from common.transformers import attend, check_mask, register

from .subjects import SUBJECTS

pytestmark = pytest.mark.filterwarnings("ignore:.*past_key_values.*is deprecated:FutureWarning")
transformers = pytest.importorskip(
    "transformers", reason="transformers is not installed: pip install '.[transformers]'"
)
device = "cuda" if torch.cuda.is_available() else "cpu"
IMPLS = ["reference"] + [pytest.param(one.name, marks=one.marks) for one in SUBJECTS]


def model(family: str, impl: str, **changed: Any) -> Any:
    """A tiny model of the family, the same one whatever its attention is."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": 97, "attn_implementation": f"fa2_{impl}" if impl in port_names() else impl}
    if family == "gpt2":
        own = {"n_layer": 2, "n_head": 2, "n_embd": 32, "n_positions": 64}
        own |= {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
        made = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes | own | changed))
    else:
        own = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64}
        own |= {"intermediate_size": 64, "max_position_embeddings": 64}
        made = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes | own | changed))
    return made.to(device)


@pytest.fixture(autouse=True)
def _registered() -> None:
    assert register() == tuple(f"fa2_{name}" for name in port_names())


@pytest.fixture
def tokens() -> torch.Tensor:
    return torch.randint(97, (2, 40), generator=torch.Generator().manual_seed(1)).to(device)


def assert_close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    tolerance = 4e-2 if ours.dtype == torch.bfloat16 else 1e-4
    torch.testing.assert_close(ours, theirs, atol=tolerance * float(theirs.detach().abs().max()), rtol=0)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_model_trains_as_with_sdpa(family: str, impl: str, tokens: torch.Tensor) -> None:
    dtype = torch.bfloat16 if device == "cuda" else torch.float32  # not every port takes fp32
    ours, theirs = model(family, impl).to(dtype), model(family, "sdpa").to(dtype)
    results = [each(tokens, labels=tokens) for each in (ours, theirs)]
    assert_close(results[0].logits, results[1].logits)
    for result in results:
        result.loss.backward()
    for (name, own), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert own.grad is not None, name
        assert_close(own.grad, other.grad)


def test_heads_are_shared_and_not_repeated(monkeypatch: pytest.MonkeyPatch, tokens: torch.Tensor) -> None:
    seen = []

    def spy(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
        seen.append((q.shape[1], k.shape[1], v.shape[1]))
        return q

    monkeypatch.setattr("common.transformers.attention", spy)
    model("llama", "reference")(tokens)
    assert seen == [(4, 2, 2)] * 2


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_cache_is_attended_to_by_chunks_and_by_single_tokens(family: str, tokens: torch.Tensor) -> None:
    ours, theirs = model(family, "reference").eval(), model(family, "sdpa").eval()
    with torch.no_grad():
        whole, cache = theirs(tokens).logits, None
        for begin, end in ((0, 20), (20, 33), (33, 34), (34, 40)):
            step = ours(tokens[:, begin:end], past_key_values=cache, use_cache=True)
            cache = step.past_key_values
            assert_close(step.logits, whole[:, begin:end])


def test_generation_gives_the_same_tokens(tokens: torch.Tensor) -> None:
    options = {"max_new_tokens": 8, "do_sample": False, "attention_mask": torch.ones_like(tokens), "pad_token_id": 0}
    ours, theirs = (model("llama", impl).eval().generate(tokens, **options) for impl in ("reference", "sdpa"))
    assert torch.equal(ours, theirs)


def test_an_attention_mask_without_padding_is_none(tokens: torch.Tensor) -> None:
    ours = model("llama", "reference")
    assert_close(ours(tokens, attention_mask=torch.ones_like(tokens)).logits, ours(tokens).logits)


def test_a_model_of_both_directions_attends_to_all_keys(tokens: torch.Tensor) -> None:
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 32, "intermediate_size": 32}
    made = []
    for impl in ("fa2_reference", "sdpa"):
        torch.manual_seed(0)
        config = transformers.BertConfig(vocab_size=97, attn_implementation=impl, **sizes)
        made.append(transformers.BertModel(config).eval().to(device))
    ours, theirs = (each(tokens).last_hidden_state for each in made)
    assert_close(ours, theirs)


def asked_for() -> dict[str, tuple[dict[str, Any], str]]:
    """What a forward of the tiny Llama on (2, 40) tokens can be given, and why it is refused."""
    ones, positions = torch.ones(2, 40, dtype=torch.int64, device=device), torch.arange(40, device=device)
    left, right = ones.clone(), ones.clone()
    left[0, :3], right[0, 37:] = 0, 0
    static = transformers.StaticCache(config=model("llama", "sdpa").config, max_cache_len=64)
    return {
        "padding on the left": ({"attention_mask": left}, "sequences are padded"),
        "padding on the right": ({"attention_mask": right}, "sequences are padded"),
        "a float mask": ({"attention_mask": torch.zeros(2, 1, 40, 40, device=device)}, "given as a tensor"),
        "packing": ({"position_ids": positions.remainder(20)[None], "use_cache": False}, "several sequences packed"),
        "a static cache": ({"past_key_values": static}, "static cache"),
        "softcap": ({"softcap": 30.0}, "softcap"),
        "probabilities": ({"output_attentions": True}, "never held"),
    }


ASKED = ["padding on the left", "padding on the right", "a float mask", "packing", "a static cache", "softcap"]


@pytest.mark.parametrize("what", [*ASKED, "probabilities"])
def test_what_no_port_expresses_is_refused_with_the_reason(what: str, tokens: torch.Tensor) -> None:
    options, words = asked_for()[what]
    with pytest.raises(Unsupported, match=f"fa2_reference cannot attend here: .*{words}"):
        model("llama", "reference")(tokens, **options)


def test_dropout_is_refused_in_training_only(tokens: torch.Tensor) -> None:
    ours = model("gpt2", "reference", attn_pdrop=0.1)
    with pytest.raises(Unsupported, match="probabilities are dropped out"):
        ours.train()(tokens)
    assert ours.eval()(tokens).logits.isfinite().all()


def test_a_sliding_window_is_refused(tokens: torch.Tensor) -> None:
    torch.manual_seed(0)
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "hidden_size": 32}
    config = transformers.MistralConfig(
        vocab_size=97, intermediate_size=32, sliding_window=8, attn_implementation="fa2_reference", **sizes
    )
    with pytest.raises(Unsupported, match="window"):
        transformers.MistralForCausalLM(config)(tokens)


def test_a_configuration_of_both_directions_counts_for_modules_that_are_causal() -> None:
    module = torch.nn.Module()
    module.is_causal, module.config = True, transformers.LlamaConfig(is_causal=False)  # type: ignore[assignment]
    q = torch.randn(1, 2, 20, 16, device=device)
    o, _ = attend("reference", module, q, q, q)
    theirs = torch.nn.functional.scaled_dot_product_attention(q, q, q)
    assert_close(o, theirs.transpose(1, 2))


def test_names_that_are_no_port_are_refused() -> None:
    with pytest.raises(ValueError, match="impl must be one of"):
        register(["triton", "flash"])
    assert register(["triton"]) == ("fa2_triton",)


def test_a_mask_of_another_function_is_refused() -> None:
    with pytest.raises(Unsupported, match="neither causal nor full"):
        check_mask("triton", 1, 4, 4, mask_function=lambda b, h, q, k: q == k)
