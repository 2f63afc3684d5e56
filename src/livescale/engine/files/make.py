"""Makes small complete models: seeded random weights, configuration and tokenizer.

They have the architecture of a supported family and its real file formats, so that everything that
serves a downloaded model serves them. Their texts mean nothing. No network; Llamas are written
here without torch, the other families by `make_family`.
"""

from __future__ import annotations

import json
import math
import random
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from livescale.engine.base.errors import ModelError
from livescale.engine.files.checkpoint import INDEX_FILE
from livescale.engine.files.families import FAMILIES

_FP32_BYTES = 4


@dataclass(frozen=True, slots=True)
class Preset:
    """Sizes of a made model (weights are fp32)."""

    decoder_layers: int
    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    vocab_size: int
    model_tokens_max: int = 4096

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.heads


PRESETS: dict[str, Preset] = {
    "tiny": Preset(4, 128, 256, 4, 2, 1024),  # 3.4 MB
    "small": Preset(6, 256, 704, 8, 2, 2048),  # 21 MB
    "medium": Preset(8, 512, 1280, 8, 2, 4096),  # 101 MB
    # 102 MB. The KV of 33,000 tokens is as large as the weights. That of large models is smaller
    # still beside theirs (Llama 3 8B: 122,000 tokens), that of "medium" is not (12,300).
    "demo": Preset(12, 384, 1344, 12, 1, 4096),
}

FAMILY_NAMES = {family.model_type: family for family in FAMILIES.values()}
"""The families that can be made, by their names in transformers."""


def make_model(
    directory: Path,
    preset: str | Preset,
    seed: int = 0,
    *,
    family: str = "llama",
    tied: bool | None = None,
) -> None:
    """Write a complete Hugging Face directory; equal arguments give equal bytes.

    `tied` leaves the head to the embedding (None: as is usual in the family). A shard of weights
    holds at most half the model's bytes. The directory appears all at once. Raises ModelError for
    an unknown preset or family and when `directory` exists and is not empty.
    """
    if isinstance(preset, str) and preset not in PRESETS:
        raise ModelError(f"unknown preset {preset!r}, there are {', '.join(PRESETS)}")
    if family not in FAMILY_NAMES:
        raise ModelError(f"unknown family {family!r}, there are {', '.join(FAMILY_NAMES)}")
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ModelError(f"{directory} exists already and is not an empty directory")
    sizes = PRESETS[preset] if isinstance(preset, str) else preset
    directory.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{directory.name}-", dir=directory.parent))
    try:
        unfinished.chmod(0o755)  # mkdtemp makes it private
        if family == "llama":
            _write_json(unfinished / "config.json", _config(sizes, bool(tied)))
            _write_weights(unfinished, sizes, seed, bool(tied))
        else:
            # Imported here: torch and transformers take seconds, and Llamas need neither.
            from livescale.engine.files.make_family import write_family

            is_tied = FAMILY_NAMES[family].is_tied if tied is None else tied
            write_family(unfinished, family, _sizes(sizes, is_tied), seed)
        _write_json(unfinished / "generation_config.json", _generation_config())
        write_tokenizer(unfinished, sizes.vocab_size, seed, sizes.model_tokens_max)
        unfinished.rename(directory)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise


# -- helpers, in the order used -----------------------------------------------------------------


def _config(sizes: Preset, tied: bool) -> dict[str, object]:
    fields: dict[str, object] = {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "dtype": "float32",
        "head_dim": sizes.head_dim,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "mlp_bias": False,
        "model_type": "llama",
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "use_cache": True,
    }
    return dict(sorted((fields | _sizes(sizes, tied)).items()))


def _sizes(sizes: Preset, tied: bool) -> dict[str, object]:
    """What the configurations of all families have in common."""
    return {
        "bos_token_id": BEGIN_ID,
        "eos_token_id": END_ID,
        "hidden_size": sizes.hidden_size,
        "intermediate_size": sizes.intermediate_size,
        "max_position_embeddings": sizes.model_tokens_max,
        "num_attention_heads": sizes.heads,
        "num_hidden_layers": sizes.decoder_layers,
        "num_key_value_heads": sizes.kv_heads,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": tied,
        "vocab_size": sizes.vocab_size,
    }


def _generation_config() -> dict[str, object]:
    return {"bos_token_id": BEGIN_ID, "do_sample": False, "eos_token_id": END_ID}


def _write_json(path: Path, value: dict[str, object]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", "utf-8")


def _write_weights(directory: Path, sizes: Preset, seed: int, tied: bool) -> None:
    shapes = dict(_shapes(sizes, tied))
    total_bytes = sum(_size_bytes(shape) for shape in shapes.values())
    shards = _shards(shapes, -(-total_bytes // 2))
    weight_map: dict[str, str] = {}
    tensor_index = 0
    for number, names in enumerate(shards, 1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        weights = {}
        for name in names:
            # A stream of its own per tensor: no tensor depends on how the others are cut.
            stream = np.random.Generator(np.random.PCG64([seed, tensor_index]))
            weights[name] = _weights(shapes[name], stream)
            weight_map[name] = file
            tensor_index += 1
        save_file(weights, str(directory / file), metadata={"format": "pt"})
    index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    _write_json(directory / INDEX_FILE, index)


def _shapes(sizes: Preset, tied: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, inner = sizes.hidden_size, sizes.intermediate_size
    kv = sizes.kv_heads * sizes.head_dim
    yield "model.embed_tokens.weight", (sizes.vocab_size, hidden)
    for layer in range(sizes.decoder_layers):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.input_layernorm.weight", (hidden,)
        yield f"{prefix}.self_attn.q_proj.weight", (hidden, hidden)
        yield f"{prefix}.self_attn.k_proj.weight", (kv, hidden)
        yield f"{prefix}.self_attn.v_proj.weight", (kv, hidden)
        yield f"{prefix}.self_attn.o_proj.weight", (hidden, hidden)
        yield f"{prefix}.post_attention_layernorm.weight", (hidden,)
        yield f"{prefix}.mlp.gate_proj.weight", (inner, hidden)
        yield f"{prefix}.mlp.up_proj.weight", (inner, hidden)
        yield f"{prefix}.mlp.down_proj.weight", (hidden, inner)
    yield "model.norm.weight", (hidden,)
    if not tied:
        yield "lm_head.weight", (sizes.vocab_size, hidden)


def _size_bytes(shape: tuple[int, ...]) -> int:
    return math.prod(shape) * _FP32_BYTES


def _shards(shapes: dict[str, tuple[int, ...]], shard_bytes_max: int) -> list[list[str]]:
    shards: list[list[str]] = [[]]
    held_bytes = 0
    for name, shape in shapes.items():
        if shards[-1] and held_bytes + _size_bytes(shape) > shard_bytes_max:
            shards.append([])
            held_bytes = 0
        shards[-1].append(name)
        held_bytes += _size_bytes(shape)
    return shards


def _weights(shape: tuple[int, ...], stream: np.random.Generator) -> np.ndarray:
    """Norms lie around 1. A matrix keeps the scale of its input, so that neither attention nor
    logits are flat: greedy tokens then depend on the whole context, which tests rely on."""
    values = stream.standard_normal(shape, dtype=np.float32)
    if len(shape) == 1:
        return np.float32(1.0) + np.float32(0.1) * values
    return values * np.float32(1 / math.sqrt(shape[1]))


BEGIN, END = "<|begin|>", "<|end|>"
ROLES = ("system", "user", "assistant")
SPECIAL_TOKENS = (BEGIN, END, *(f"<|{role}|>" for role in ROLES))
BEGIN_ID, END_ID = 0, 1

CHAT_TEMPLATE = """\
{{- bos_token -}}
{%- for message in messages -%}
{%- if message['role'] not in ['system', 'user', 'assistant'] -%}
{{- raise_exception('Unknown role: ' + message['role']) -}}
{%- endif -%}
{{- '<|' + message['role'] + '|>' + message['content'] + eos_token -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|assistant|>' -}}
{%- endif -%}
"""

_ONSETS = (
    *("b", "bl", "br", "c", "ch", "cl", "d", "dr", "f", "fl", "g", "gr", "h", "j", "k", "l"),
    *("m", "n", "p", "pr", "qu", "r", "s", "sh", "sl", "st", "t", "th", "tr", "v", "w", "z"),
)
_VOWELS = ("a", "ai", "e", "ea", "ee", "i", "ie", "o", "oa", "oo", "ou", "u", "y")
_CODAS = ("", "", "l", "ld", "m", "n", "nd", "ng", "r", "rt", "s", "st", "t", "x")
_PUNCTUATION = (",", ".", ".", "?", "!", ";", ":")


def write_tokenizer(directory: Path, vocabulary: int, seed: int, model_tokens_max: int) -> None:
    """Put tokenizer.json, tokenizer_config.json and chat_template.jinja into `directory`.

    The tokenizer knows exactly `vocabulary` ids, special tokens included.
    """
    tokenizer = _train(vocabulary, seed)
    assert tokenizer.get_vocab_size() == vocabulary, "the corpus is too small for the vocabulary"
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "bos_token": BEGIN,
        "clean_up_tokenization_spaces": False,
        "eos_token": END,
        "model_max_length": model_tokens_max,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE, "utf-8")


def _train(vocabulary: int, seed: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A",
        pair=f"{BEGIN} $A $B",
        special_tokens=[(BEGIN, BEGIN_ID)],
    )
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        min_frequency=1,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_corpus(vocabulary, random.Random(seed)), trainer)
    return tokenizer


def _corpus(vocabulary: int, draw: random.Random) -> list[str]:
    """Sentences of invented words, common ones more often (Zipf), with numbers and punctuation."""
    words = sorted({_word(draw) for _ in range(2 * vocabulary)})
    draw.shuffle(words)
    weights = [1 / rank for rank in range(1, len(words) + 1)]
    lines = [" " + " ".join(words)]  # every word once, or a small sample may hold too few
    for _ in range(vocabulary):
        chosen = draw.choices(words, weights, k=12)
        chosen.insert(draw.randrange(12), str(draw.randrange(3000)))
        lines.append(" ".join(chosen).capitalize() + draw.choice(_PUNCTUATION))
    return lines


def _word(draw: random.Random) -> str:
    syllables = draw.choice((1, 2, 2, 3))
    return "".join(
        draw.choice(_ONSETS) + draw.choice(_VOWELS) + draw.choice(_CODAS) for _ in range(syllables)
    )
