# SPDX-License-Identifier: Apache-2.0
"""Write the reference answers for the demo model: tests/data/smollm2/goldens.json.

    python tools/make_goldens.py SmolLM2-135M-Instruct.Q4_1.gguf [OUT.json]

Run once by hand. It needs torch and transformers (and gguf, tokenizers, jinja2), which are not dependencies of this
project. The reference is the Hugging Face LlamaForCausalLM in float32 on the dequantised weights. The weights and the
tokenizer are built here and not by transformers' own GGUF loader: that one does not know the "smollm" pre-tokenizer and
would give wrong ids where whitespace precedes a digit. Nothing here uses our converter, which is what is tested.
"""

import hashlib
import json
import sys
from pathlib import Path

import jinja2.sandbox
import numpy as np
import tokenizers
import torch
import transformers
from gguf import GGUFReader, dequantize

N_NEW = 64
TOP = 20
# Below this margin between the two best logits, float noise may decide a greedy step: such a prompt proves nothing.
MIN_GREEDY_MARGIN = 0.005

TOP_LEVEL = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
IN_LAYER = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}

# name, system message ("": the template's own; None: no template, raw text), text. Every chat has another system message:
# a shared beginning would count the same positions several times.
PROMPTS = [
    ("capital", "", "What is the capital of France?"),
    ("square", "You are a Python expert. Answer with code.", "Write a one-line Python function that returns the square of x."),
    ("arithmetic", "Explain your reasoning before you give a number.",
     "Compute 48 + 27 - 9 step by step, then say whether the result is even or odd."),
    ("french", "Tu es un conteur. Tu réponds en français.", "Raconte une courte histoire d'un chat qui n'aime pas l'été."),
    ("letter", "You are an assistant who writes e-mails.",
     "Write a short, polite reminder that the report was due on 3/14... & that I still have nothing!"),
    ("story", None, "The lighthouse keeper had not spoken to anyone for three winters. On the first morning of spring, a small boat came"),
    ("code", None,
     "class Stack:\n    \"\"\"A last-in, first-out list.\"\"\"\n\n    def __init__(self):\n        self.items = []\n\n"
     "    def push(self, item):\n        self.items.append(item)\n\n    def pop(self):\n"),
    ("digits", None, "Year,Population,Area\n1950,2536431149,148940\n1960,3034949748,148940\n1970,  3700437046,148940\n1980,"),
    ("release", None, "# Release notes\n\n## 2.10.3\n\n* Fixed a crash when the file name is empty (#1204).\n*"),
    ("tides", "Summarize the text of the user in two sentences.",
     "The tides are the rise and fall of sea levels caused by the gravity of the Moon and the Sun, together with the rotation "
     "of the Earth. Most coasts see two high tides and two low tides in each lunar day, which lasts about 24 hours and 50 "
     "minutes. When the Sun, the Moon and the Earth are in line, at new moon and at full moon, their pulls add up and the "
     "range of the tide is largest; sailors call this a spring tide. A week later the Sun and the Moon pull at right angles "
     "and the range is smallest, which is called a neap tide. The shape of the coast and the depth of the water also matter: "
     "in the Bay of Fundy the difference between low and high water can pass 16 metres, while in the Mediterranean it is "
     "often less than half a metre."),
]


def hf_name(name):
    parts = name.split(".")
    if parts[0] == "blk":
        return f"model.layers.{parts[1]}.{IN_LAYER[parts[2]]}.{parts[3]}"
    return f"{TOP_LEVEL[parts[0]]}.{parts[1]}"


def unpermute(rows, n_heads):
    """GGUF stores the rows of q and k with rotated pairs side by side; Hugging Face wants first halves, then second halves."""
    half = rows.shape[0] // n_heads // 2
    return rows.reshape(n_heads, half, 2, -1).swapaxes(1, 2).reshape(rows.shape)


def read_gguf(path):
    reader = GGUFReader(path)
    meta = {key: field.contents() for key, field in reader.fields.items()}
    heads = {"attn_q": meta["llama.attention.head_count"], "attn_k": meta["llama.attention.head_count_kv"]}
    weights = {}
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        kind = tensor.name.split(".")[-2]
        weights[hf_name(tensor.name)] = unpermute(values, heads[kind]) if kind in heads else values
    return meta, weights


def hf_config(meta):
    return transformers.LlamaConfig(
        vocab_size=len(meta["tokenizer.ggml.tokens"]),
        hidden_size=meta["llama.embedding_length"],
        intermediate_size=meta["llama.feed_forward_length"],
        num_hidden_layers=meta["llama.block_count"],
        num_attention_heads=meta["llama.attention.head_count"],
        num_key_value_heads=meta["llama.attention.head_count_kv"],
        max_position_embeddings=meta["llama.context_length"],
        rms_norm_eps=meta["llama.attention.layer_norm_rms_epsilon"],
        rope_parameters={"rope_type": "default", "rope_theta": meta["llama.rope.freq_base"]},
        tie_word_embeddings=True,
        bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )


def build_model(meta, weights):
    model = transformers.LlamaForCausalLM(hf_config(meta)).float().eval()
    model.set_attn_implementation("eager")
    loaded = model.load_state_dict({name: torch.from_numpy(values.copy()) for name, values in weights.items()}, strict=False)
    if loaded.unexpected_keys or loaded.missing_keys != ["lm_head.weight"]:
        raise SystemExit(f"make_goldens: tensors do not fit the model: {loaded}")
    model.tie_weights()
    model.generation_config.eos_token_id = None   # 64 tokens, whatever they are
    model.generation_config.pad_token_id = 0
    return model


def build_tokenizer(meta):
    """Byte-level BPE; the "smollm" pre-tokenizer cuts out every digit before it applies the GPT-2 expression."""
    if (meta["tokenizer.ggml.model"], meta["tokenizer.ggml.pre"]) != ("gpt2", "smollm"):
        raise SystemExit("make_goldens: not the tokenizer this script knows")
    tokens = meta["tokenizer.ggml.tokens"]
    bpe = tokenizers.models.BPE(vocab={token: i for i, token in enumerate(tokens)},
                                merges=[tuple(merge.split(" ")) for merge in meta["tokenizer.ggml.merges"]])
    tokenizer = tokenizers.Tokenizer(bpe)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([
        tokenizers.pre_tokenizers.Digits(individual_digits=True),
        tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False),
    ])
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, meta["tokenizer.ggml.token_type"]) if kind == 3]
    tokenizer.add_special_tokens([tokenizers.AddedToken(token, special=True, normalized=False) for token in control])
    return tokenizer


def chat_text(meta, messages):
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(meta["tokenizer.chat_template"]).render(messages=messages, add_generation_prompt=True)


@torch.no_grad()
def golden(model, tokenizer, meta, name, system, text):
    messages = None
    if system is not None:
        messages = ([{"role": "system", "content": system}] if system else []) + [{"role": "user", "content": text}]
        text = chat_text(meta, messages)
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    generated = model.generate(torch.tensor([ids]), attention_mask=torch.ones(1, len(ids)), max_new_tokens=N_NEW, do_sample=False)
    greedy = generated[0, len(ids):].tolist()
    logits = model(torch.tensor([ids + greedy])).logits[0]
    best, best_ids = logits.topk(TOP)
    margins = best[:, 0] - best[:, 1]
    if best_ids[len(ids) - 1:-1, 0].tolist() != greedy:
        raise SystemExit(f"make_goldens: prompt {name!r}: cached and uncached passes disagree")
    smallest = margins[len(ids) - 1:-1].min().item()
    if smallest < MIN_GREEDY_MARGIN:
        raise SystemExit(f"make_goldens: prompt {name!r} has a greedy margin of {smallest:.5f}: replace the prompt")
    # The first positions of a prompt, its last one and the last of the answer
    positions = sorted({0, 1, len(ids) // 2, len(ids) - 1, len(ids) + N_NEW // 2, len(ids) + N_NEW - 1})
    print(f"{name:12s} {len(ids):4d} ids, smallest greedy margin {smallest:.4f}, smallest margin {margins.min().item():.4f}: "
          f"{tokenizer.decode(greedy, skip_special_tokens=False)[:70]!r}")
    return {
        "name": name, "messages": messages, "text": text, "ids": ids, "greedy": greedy,
        "smallest_greedy_margin": round(smallest, 4),
        "top1": best_ids[:, 0].tolist(),
        "margin": [round(margin, 4) for margin in margins.tolist()],
        "top": {str(p): [[i, round(value, 5)] for i, value in zip(best_ids[p].tolist(), best[p].tolist())] for p in positions},
    }


def dump(goldens):
    """One line per prompt and per long field, so that a change shows up as a small difference."""
    head = {key: value for key, value in goldens.items() if key != "prompts"}
    lines = [json.dumps(head, indent=0)[:-2].replace("\n", "\n ") + ',\n "prompts": [']
    for prompt in goldens["prompts"]:
        fields = [f"   {json.dumps(key)}: {json.dumps(value, separators=(',', ':'))}" for key, value in prompt.items()]
        lines.append("  {\n" + ",\n".join(fields) + "\n  },")
    lines[-1] = lines[-1][:-1]
    return "\n".join(lines) + "\n ]\n}\n"


def main():
    if len(sys.argv) not in (2, 3):
        raise SystemExit(__doc__)
    source = Path(sys.argv[1])
    out = Path(sys.argv[2]) if len(sys.argv) == 3 else Path(__file__).parent.parent / "tests/data/smollm2/goldens.json"
    meta, weights = read_gguf(source)
    model, tokenizer = build_model(meta, weights), build_tokenizer(meta)
    goldens = {
        "made_by": "tools/make_goldens.py",
        "source": source.name,
        "sha256": hashlib.sha256(source.read_bytes()).hexdigest(),
        "reference": f"transformers {transformers.__version__}, torch {torch.__version__}, float32, eager attention",
        "vocab_size": model.config.vocab_size,
        "prompts": [golden(model, tokenizer, meta, *prompt) for prompt in PROMPTS],
    }
    text = dump(goldens)
    assert json.loads(text) == goldens
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(text, encoding="utf-8")
    print(f"{out}: {len(text)} bytes")


if __name__ == "__main__":
    main()
