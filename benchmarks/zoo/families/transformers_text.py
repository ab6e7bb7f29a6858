"""Families of transformers that read text: encoders, decoders with and without cache, encoder–decoders."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import Tensor

from benchmarks.zoo.families.family import Family, configured, padding, tokens

_VOCABULARY, _LENGTH = 1000, 48
_SIZES = {"vocab_size": _VOCABULARY, "hidden_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4}
_ENCODER = {**_SIZES, "intermediate_size": 384, "max_position_embeddings": 80}
_DECODER = {**_ENCODER, "use_cache": False, "num_key_value_heads": 2, "pad_token_id": 0}
_GPT2 = {"vocab_size": _VOCABULARY, "n_embd": 192, "n_layer": 2, "n_head": 4, "n_positions": 80}
_SEQ2SEQ = {
    "vocab_size": _VOCABULARY,
    "d_model": 192,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 384,
    "decoder_ffn_dim": 384,
    "max_position_embeddings": 80,
    "use_cache": False,
}
_SPECIAL = {"bos_token_id": 1, "eos_token_id": 2}
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}

# Name, class, and the settings of its configuration.
_ENCODERS: list[tuple[str, str, Mapping[str, Any]]] = [
    ("bert", "BertForSequenceClassification", _ENCODER),
    (
        "distilbert",
        "DistilBertModel",
        {"vocab_size": _VOCABULARY, "dim": 192, "n_layers": 2, "n_heads": 4, "hidden_dim": 384},
    ),
    ("roberta", "RobertaModel", _ENCODER),
    ("albert", "AlbertModel", {**_ENCODER, "embedding_size": 64}),
    ("electra", "ElectraModel", {**_ENCODER, "embedding_size": 64}),
    ("mpnet", "MPNetModel", _ENCODER),
    ("deberta_v2", "DebertaV2Model", {**_ENCODER, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]}),
    ("mobilebert", "MobileBertModel", {**_SIZES, "intermediate_size": 384, "intra_bottleneck_size": 192}),
    ("squeezebert", "SqueezeBertModel", {**_ENCODER, "embedding_size": 192}),
    ("modernbert", "ModernBertModel", {**_ENCODER, "global_attn_every_n_layers": 2, "pad_token_id": 0, **_SPECIAL}),
    (
        "funnel",
        "FunnelBaseModel",
        {"vocab_size": _VOCABULARY, "block_sizes": [1, 1], "d_model": 192, "n_head": 4, "d_head": 48, "d_inner": 384},
    ),
    ("fnet", "FNetModel", {**_ENCODER}),
]
_DECODERS: list[tuple[str, str, Mapping[str, Any]]] = [
    ("gpt2", "GPT2LMHeadModel", {**_GPT2, "use_cache": False}),
    ("gpt2_cache", "GPT2LMHeadModel", {**_GPT2, "use_cache": True}),
    ("gpt_neox", "GPTNeoXForCausalLM", {**_ENCODER, "use_cache": False}),
    ("opt", "OPTForCausalLM", {**_ENCODER, "ffn_dim": 384, "word_embed_proj_dim": 192, "use_cache": False}),
    (
        "bloom",
        "BloomForCausalLM",
        {"vocab_size": _VOCABULARY, "hidden_size": 192, "n_layer": 2, "n_head": 4, "use_cache": False},
    ),
    ("falcon", "FalconForCausalLM", {**_SIZES, "use_cache": False}),
    ("phi", "PhiForCausalLM", _DECODER),
    ("llama", "LlamaForCausalLM", _DECODER),
    ("llama_cache", "LlamaForCausalLM", {**_DECODER, "use_cache": True}),
    ("llama_10k", "LlamaForCausalLM", {**_DECODER, "vocab_size": 10000}),
    ("mistral_cache", "MistralForCausalLM", {**_DECODER, "use_cache": True}),
    ("qwen2", "Qwen2ForCausalLM", _DECODER),
    ("qwen3_cache", "Qwen3ForCausalLM", {**_DECODER, "head_dim": 48, "use_cache": True}),
    ("gemma2", "Gemma2ForCausalLM", {**_DECODER, "head_dim": 48}),
    ("mixtral", "MixtralForCausalLM", {**_DECODER, **_EXPERTS}),
    (
        "mamba",
        "MambaForCausalLM",
        {"vocab_size": _VOCABULARY, "hidden_size": 96, "num_hidden_layers": 1, "use_cache": False},
    ),
]
_ENCODER_DECODERS: list[tuple[str, str, Mapping[str, Any]]] = [
    (
        "t5",
        "T5ForConditionalGeneration",
        {
            "vocab_size": _VOCABULARY,
            "d_model": 192,
            "d_kv": 48,
            "d_ff": 384,
            "num_layers": 2,
            "num_heads": 4,
            "use_cache": False,
        },
    ),
    ("bart", "BartForConditionalGeneration", _SEQ2SEQ),
    ("bart_cache", "BartForConditionalGeneration", {**_SEQ2SEQ, "use_cache": True}),
    ("marian", "MarianMTModel", {**_SEQ2SEQ, "pad_token_id": 0, "decoder_start_token_id": 0}),
]


def _text(batch: int) -> dict[str, Tensor]:
    return {"input_ids": tokens(batch, _LENGTH, _VOCABULARY), "attention_mask": padding(batch, _LENGTH)}


def _unmasked(batch: int) -> dict[str, Tensor]:
    return {"input_ids": tokens(batch, _LENGTH, _VOCABULARY)}


def _pair(batch: int) -> dict[str, Tensor]:
    return {**_text(batch), "decoder_input_ids": tokens(batch, 16, _VOCABULARY)}


FAMILIES = [Family(n, "transformers", "text encoder", partial(configured, c, s), _text) for n, c, s in _ENCODERS]
FAMILIES += [Family(n, "transformers", "decoder", partial(configured, c, s), _unmasked) for n, c, s in _DECODERS]
FAMILIES += [
    Family(n, "transformers", "encoder–decoder", partial(configured, c, s), _pair) for n, c, s in _ENCODER_DECODERS
]
