"""Models of transformers as checkpoints: the same logits, or a reason why not."""

import json

import pytest
import tokenizers
import torch
import transformers

from models.convert.__main__ import main
from models.convert.transformers_checkpoint import from_transformers
from models.errors import UserError
from models.generation.loop import prompt_ids
from models.training.checkpoint import find_checkpoint
from models.vocab.tokenizer import train_bpe

V = 300
COMMON = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 48, "vocab_size": V,
          "max_position_embeddings": 64}  # fmt: skip


def gpt2(**changes):
    return transformers.GPT2Config(vocab_size=V, n_embd=32, n_layer=3, n_head=4, n_positions=64, **changes)


def llama(**changes):
    return transformers.LlamaConfig(**COMMON, **({"num_key_value_heads": 2} | changes))


def gemma3(**changes):
    settings = {"num_key_value_heads": 1, "head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 16}
    settings["layer_types"] = ["sliding_attention", "sliding_attention", "full_attention"]
    return transformers.Gemma3TextConfig(**COMMON, **(settings | changes))


CONFIGS = {
    "gpt2": gpt2,
    "gpt2 untied": lambda: gpt2(tie_word_embeddings=False),
    "llama": llama,
    "llama tied": lambda: llama(tie_word_embeddings=True, head_dim=16, rope_theta=100_000.0),
    "gemma3": gemma3,
    "gemma3 all local": lambda: gemma3(layer_types=["sliding_attention"] * 3),
}


def random_model(config) -> torch.nn.Module:
    """A model whose every weight is random: neutral norms and zero biases would hide a wrong mapping."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return model


def tokenizer_json(folder, size=V):
    return train_bpe(["some text to learn merges from, and some more of it"] * 3, size).save(folder / "tokenizer.json")


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_equal_transformers(name):
    hf = random_model(CONFIGS[name]())
    ids = torch.randint(V, (2, 40))
    with torch.inference_mode():
        torch.testing.assert_close(from_transformers(hf).logits(ids), hf(ids).logits, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma3"])
def test_a_folder_becomes_a_checkpoint(name, tmp_path, capsys):
    hf = random_model(CONFIGS[name]())
    hf.save_pretrained(tmp_path / "hf")
    tokenizer_json(tmp_path / "hf")
    assert main(["hf", str(tmp_path / "hf"), str(tmp_path / "out")]) == 0
    assert "logits equal transformers'" in capsys.readouterr().out
    checkpoint = find_checkpoint(tmp_path / "out")
    ids = torch.randint(V, (1, 20))
    with torch.inference_mode():
        torch.testing.assert_close(checkpoint.load_model().logits(ids), hf(ids).logits, atol=1e-4, rtol=1e-5)
    assert not (tmp_path / "out" / "optimizer.pt").exists()
    with pytest.raises(UserError, match="exists"):
        main(["hf", str(tmp_path / "hf"), str(tmp_path / "out")])


REFUSED = {
    "rope_type|'linear'|linear": lambda: llama(rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}),
    "attention_bias": lambda: llama(attention_bias=True),
    "mlp_bias": lambda: llama(mlp_bias=True),
    "hidden_act": lambda: llama(hidden_act="relu"),
    "activation_function": lambda: gpt2(activation_function="relu"),
    "scale_attn_by_inverse_layer_idx": lambda: gpt2(scale_attn_by_inverse_layer_idx=True),
    "final_logit_softcapping": lambda: gemma3(final_logit_softcapping=30.0),
    "layer_types": lambda: gemma3(layer_types=["full_attention", "full_attention", "sliding_attention"]),
    "model type 'mistral'": lambda: transformers.MistralConfig(**COMMON, num_key_value_heads=2),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_other_arithmetic_is_refused_by_name(reason):
    with pytest.raises(UserError, match=reason):
        from_transformers(random_model(REFUSED[reason]()))


def test_bad_sources_are_named(tmp_path):
    with pytest.raises(UserError, match="expected a folder"):
        main(["hf", str(tmp_path), str(tmp_path / "out")])
    (tmp_path / "config.json").write_text("{}")
    tokenizer_json(tmp_path)
    with pytest.raises(UserError, match="transformers cannot load it"):
        main(["hf", str(tmp_path), str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()


def test_a_larger_tokenizer_is_refused(tmp_path):
    config = llama()
    config.vocab_size = 270
    random_model(config).save_pretrained(tmp_path / "hf")
    tokenizer_json(tmp_path / "hf", 290)
    with pytest.raises(UserError, match="tokens, the model only 270"):
        main(["hf", str(tmp_path / "hf"), str(tmp_path / "out")])


def test_documents_begin_with_what_the_tokenizer_adds(tmp_path):
    random_model(llama()).save_pretrained(tmp_path / "hf")
    path = tokenizer_json(tmp_path / "hf")
    for i, added in enumerate([False, True]):
        backend = tokenizers.Tokenizer.from_file(str(path))
        if added:
            backend.add_special_tokens(["<s>"])
            start = backend.token_to_id("<s>")
            backend.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", start)])
        backend.save(str(path))
        main(["hf", str(tmp_path / "hf"), str(tmp_path / f"out{i}")])
        tokenizer = find_checkpoint(tmp_path / f"out{i}").load_tokenizer()
        assert tokenizer.eos_id == 0
        assert tokenizer.start_id == (start if added else None)
        assert prompt_ids(tokenizer, "merge", 64)[0] == (start if added else tokenizer.encode("merge")[0])


@pytest.mark.parametrize("change, message", [({"num_hidden_layers": 4}, "9 missing, such as model.layers.3"),
                                             ({"num_hidden_layers": 2}, "9 unexpected, such as model.layers.2"),
                                             ({"num_attention_heads": 0}, "transformers cannot load it")])  # fmt: skip
def test_weights_that_are_not_those_of_the_settings_are_refused(tmp_path, change, message):
    random_model(llama()).save_pretrained(tmp_path / "hf")
    tokenizer_json(tmp_path / "hf")
    settings = json.loads((tmp_path / "hf" / "config.json").read_text())
    (tmp_path / "hf" / "config.json").write_text(json.dumps(settings | change))
    with pytest.raises(UserError, match=message) as caught:
        main(["hf", str(tmp_path / "hf"), str(tmp_path / "out")])
    assert "\n" not in str(caught.value) and not (tmp_path / "out").exists()
