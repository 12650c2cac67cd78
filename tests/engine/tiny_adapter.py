"""Makes a LoRA adapter of random weights for the tiny model: enough for an engine to load it and to answer otherwise with it.

Called with the model's folder and the folder to make, from vLLM's own environment, which has safetensors and torch.
"""

import json
import sys
from pathlib import Path

RANK = 8
# Large, so that even greedy answers differ from the model's own.
ALPHA = 512


def make(model: Path, folder: Path) -> None:
    """Writes `adapter_config.json` and `adapter_model.safetensors`."""
    import torch
    from safetensors.torch import save_file

    config = json.loads((model / "config.json").read_text())
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    heads = config["num_attention_heads"] * config.get("head_dim", hidden // config["num_attention_heads"])
    generator = torch.Generator().manual_seed(7)
    weights = {}
    for layer in range(layers):
        name = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        weights[f"{name}.lora_A.weight"] = torch.randn(RANK, hidden, generator=generator)
        weights[f"{name}.lora_B.weight"] = torch.randn(heads, RANK, generator=generator)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "adapter_model.safetensors")
    adapter = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": ALPHA, "target_modules": ["q_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(adapter))


if __name__ == "__main__":
    make(Path(sys.argv[1]), Path(sys.argv[2]))
