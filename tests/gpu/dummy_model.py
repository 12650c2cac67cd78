"""dummy_model.py TINY_MODEL OUT -- a model of the shape of Qwen3-1.7B without weights, for `--load-format dummy`.

TINY_MODEL is what tests/engine/tiny_model.py makes. Its vocabulary is padded to the real one's size, so that the output layer and sampling cost
what they cost for the real model. What it says is noise; what it costs is real.
"""

import json
import shutil
import sys
from pathlib import Path

VOCABULARY = 151_936
SHAPE = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "torch_dtype": "bfloat16",
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 40_960,
    "max_window_layers": 28,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000,
    "sliding_window": None,
    "use_sliding_window": False,
    "attention_bias": False,
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 2,
}


def main() -> None:
    """Writes the folder."""
    tiny, out = Path(sys.argv[1]), Path(sys.argv[2])
    out.mkdir(parents=True, exist_ok=True)
    tokenizer = json.loads((tiny / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    for token in range(len(vocabulary), VOCABULARY):
        vocabulary[f"\u0120filler{token}"] = token
    (out / "tokenizer.json").write_text(json.dumps(tokenizer))
    for name in ("tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(tiny / name, out / name)
    (out / "config.json").write_text(json.dumps(SHAPE, indent=2))


if __name__ == "__main__":
    main()
