# SPDX-License-Identifier: Apache-2.0
"""What a source says about its model, in one vocabulary for all sources, and the check that its tensors agree.

Tensors go by canonical names: those of GGUF, such as `blk.3.attn_q.weight`. Sources map their own names to these."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from .errors import ConvertError, listed
from .files import RangeFile
from .rope import Rope
from .tensors import Tensor

MAX_HEAD_DIM = 512  # what the runtime takes

# The parts whose biases come together: all of them in every layer, or none.
BIAS_GROUPS = {
    "attn_qkv": ("attn_q", "attn_k", "attn_v"),
    "attn_output": ("attn_output",),
    "ffn_gate_up": ("ffn_gate", "ffn_up"),
    "ffn_down": ("ffn_down",),
}


@dataclass(frozen=True)
class Family:
    """What tells one supported architecture from another."""

    qk_norm: bool = False
    biases: frozenset[str] = frozenset()  # groups that may have biases
    required_biases: frozenset[str] = frozenset()


FAMILIES = {
    "llama": Family(biases=frozenset(BIAS_GROUPS)),
    "mistral": Family(),
    "qwen2": Family(biases=frozenset({"attn_qkv"}), required_biases=frozenset({"attn_qkv"})),
    "qwen3": Family(qk_norm=True, biases=frozenset({"attn_qkv", "attn_output"})),
}
PLANNED = (
    "chatglm",
    "glm",
    "glm4",
    "glm4_moe",
    "glm4moe",
    "glm4_moe_lite",
    "glm_moe_dsa",
    "glm-dsa",
    "glm5_next",
    "deepseek2",
    "deepseek_v32",
)


def require_family(arch: str, where: str) -> None:
    if arch not in FAMILIES:
        yet = " yet" if arch in PLANNED else ""
        raise ConvertError(f"{where}: architecture {arch!r} is not supported{yet} (supported: {', '.join(FAMILIES)})")


def require_head_dim(head_dim: int, where: str) -> None:
    """Checked before tables of that size are made."""
    if head_dim % 2:
        raise ConvertError(f"{where}: head_dim {head_dim} is odd")
    if head_dim > MAX_HEAD_DIM:
        raise ConvertError(f"{where}: head_dim {head_dim} is above {MAX_HEAD_DIM}")


def sampling_defaults(values: dict, where: str, warnings: list[str]) -> dict:
    """Recommended sampling options: numbers only, as they reach users by their own names."""
    good = {key: value for key, value in values.items() if value is not None and _is_sampling_value(key, value)}
    bad = [f"{key} {value!r}" for key, value in values.items() if value is not None and key not in good]
    if bad:
        warnings.append(f"{where}: ignored what is no sampling option: {', '.join(bad)}")
    return good


def _is_sampling_value(key: str, value: object) -> bool:
    if key == "do_sample" or isinstance(value, bool):
        return key == "do_sample" and isinstance(value, bool)
    return isinstance(value, (int, float)) and math.isfinite(value)


@dataclass
class TokenizerData:
    json: str | None = None  # tokenizer.json
    size: int | None = None  # its highest id + 1
    chat_template: str | None = None
    special_tokens: dict[str, str] = field(default_factory=dict)
    bos: int | None = None
    eos: list[int] = field(default_factory=list)
    generation: dict = field(default_factory=dict)


@dataclass
class Source:
    """An opened source. Sizes are those it states; `check` compares them with its tensors."""

    where: str  # for messages
    name: str  # of the model, for people
    arch: str
    files: list[RangeFile]
    hidden_size: int
    intermediate_size: int
    layer_count: int
    head_count: int
    kv_head_count: int
    head_dim: int
    context_length: int
    rms_norm_eps: float
    attention_scale: float
    rope: Rope
    tensors: dict[str, Tensor]
    extra: list[str]  # names, in the source's spelling, that mean nothing here
    tokenizer: TokenizerData
    own_names: dict[str, str]  # canonical pattern to the source's spelling, with {} for the layer
    stated_vocab: int | None = None
    tied: bool | None = None  # None: the source has no flag, a missing head means tied
    bias_flags: dict[str, bool] = field(default_factory=dict)
    hint: str = ""  # appended when tensors do not fit, e.g. an unknown quantisation
    warnings: list[str] = field(default_factory=list)

    def own_name(self, canonical: str) -> str:
        if not canonical.startswith("blk."):
            return self.own_names.get(canonical, canonical)
        _, layer, part, kind = canonical.split(".")
        return self.own_names.get(f"{part}.{kind}", f"blk.{{}}.{part}.{kind}").format(layer)

    def has_bias(self, group: str) -> bool:
        return any(f"blk.{i}.{part}.bias" in self.tensors for i in range(self.layer_count) for part in BIAS_GROUPS[group])

    @property
    def vocab_size(self) -> int:
        return self.tensors["token_embd.weight"].shape[0]

    def close(self) -> None:
        for file in self.files:
            file.close()


def check(source: Source, skip_unknown: bool) -> None:
    """Compare the tensors with what the hyper-parameters ask for. Everything wrong is told at once, by name."""
    _check_sizes(source)
    expected = _expected_shapes(source)
    missing = [source.own_name(name) for name in expected if name not in source.tensors]
    if source.tied is False and "output.weight" not in source.tensors:
        missing.append(source.own_name("output.weight"))
    known = set(expected) | {"output.weight"}
    extra = source.extra + [tensor.name for name, tensor in source.tensors.items() if name not in known]
    faults = []
    if missing:
        faults.append(f"missing tensors: {listed(missing)}")
    if extra and not skip_unknown:
        faults.append(f"tensors with no place in a {source.arch} model of {source.layer_count} layers: {listed(extra)}")
    faults += _wrong_shapes(source, expected)
    if faults:
        raise ConvertError(f"{source.where}: {'; '.join(faults)}{source.hint}")
    if extra:
        source.warnings.append(f"left out on request: {listed(extra)}")
    _compare_flags(source)
    _check_vocabulary(source)


def _check_sizes(source: Source) -> None:
    if source.head_count % source.kv_head_count:
        raise ConvertError(f"{source.where}: {source.head_count} heads are not a multiple of {source.kv_head_count} key/value heads")
    if source.layer_count > len(source.tensors):
        raise ConvertError(f"{source.where}: {source.layer_count} layers, but only {len(source.tensors)} tensors that are known")


def _expected_shapes(source: Source) -> dict[str, tuple[int, ...]]:
    """Shape by canonical name; the head, which may be absent, apart."""
    width, inner, d = source.hidden_size, source.intermediate_size, source.head_dim
    q, kv = source.head_count * d, source.kv_head_count * d
    family = FAMILIES[source.arch]
    shapes: dict[str, tuple[int, ...]] = {"output_norm.weight": (width,)}
    embedding = source.tensors.get("token_embd.weight")
    shapes["token_embd.weight"] = (embedding.shape[0] if embedding else 0, width)
    matrices = {
        "attn_q": (q, width), "attn_k": (kv, width), "attn_v": (kv, width), "attn_output": (width, q),
        "ffn_gate": (inner, width), "ffn_up": (inner, width), "ffn_down": (width, inner),
    }  # fmt: skip
    vectors = {"attn_norm": (width,), "ffn_norm": (width,)}
    if family.qk_norm:
        vectors |= {"attn_q_norm": (d,), "attn_k_norm": (d,)}
    biased = [group for group in family.biases if group in family.required_biases or source.has_bias(group)]
    for i in range(source.layer_count):
        shapes |= {f"blk.{i}.{part}.weight": shape for part, shape in (matrices | vectors).items()}
        shapes |= {f"blk.{i}.{part}.bias": matrices[part][:1] for group in biased for part in BIAS_GROUPS[group]}
    return shapes


def _wrong_shapes(source: Source, expected: dict[str, tuple[int, ...]]) -> list[str]:
    expected = expected | {"output.weight": expected["token_embd.weight"]}
    return [
        f"tensor {tensor.name} has shape {list(tensor.shape)}, expected {list(expected[name])}"
        for name, tensor in source.tensors.items()
        if name in expected and tensor.shape != expected[name]
    ][:8]


def _compare_flags(source: Source) -> None:
    for group, flag in source.bias_flags.items():
        if flag != source.has_bias(group):
            there = "has" if source.has_bias(group) else "lacks"
            source.warnings.append(f"the file {there} biases of {group}, unlike its config says; the file's tensors are used")


def _check_vocabulary(source: Source) -> None:
    rows = source.vocab_size
    if source.stated_vocab is not None and source.stated_vocab != rows:
        source.warnings.append(f"vocab_size is {source.stated_vocab}, but the embedding has {rows} rows; the rows are used")
    size = source.tokenizer.size
    if size is not None and size > rows:
        raise ConvertError(f"{source.where}: the tokenizer has the token id {size - 1}, but the embedding only {rows} rows")
    outside = [i for i in source.tokenizer.eos if not 0 <= i < rows]
    if outside:
        source.warnings.append(f"end-of-text ids {outside} are outside the vocabulary of {rows}; ignored")
        source.tokenizer.eos = [i for i in source.tokenizer.eos if i not in outside]
    if source.tokenizer.bos is not None and not 0 <= source.tokenizer.bos < rows:
        source.warnings.append(f"the begin-of-text id {source.tokenizer.bos} is outside the vocabulary of {rows}; ignored")
        source.tokenizer.bos = None
