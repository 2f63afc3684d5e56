"""A small tokenizer for made models: byte-level BPE over generated text, with chat roles.

The same (vocabulary size, seed) gives the same bytes. No network, no torch.
"""

import json
import random
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

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
