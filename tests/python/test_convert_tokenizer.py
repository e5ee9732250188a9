# SPDX-License-Identifier: Apache-2.0
"""Tokenizers, chat templates, special tokens and end-of-text ids, from both kinds of source."""

import json

import numpy as np
import pytest
import tiny
from readback import ReadBack
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers

from hisparse_rt.tools.convert import ConvertError, convert

pytestmark = pytest.mark.python

# Digit runs, line ends, other scripts, combining accents, joined emoji, long spaces, code, text right after a special token.
PIECES = [
    "Hello world",
    "don't",
    "I'LL WE'VE",
    "12345",
    "3.14159",
    "x  1",
    "a\t\t42",
    "\n\n1. item",
    "line\r\nend",
    "日本語テキスト",
    "naïve cafe\u0301",
    "👩‍👩‍👧‍👦 family",
    "🙂",
    "     long    spaces   ",
    "def f(x):\n    return x**2  # ok",
    "foo(bar)[0] += 1;",
    "<|turn|>after",
    "a<|end|>b<|begin|>",
    "١٢٣ ½ Ⅻ",
    "HTTPServer2Client",
    "émigré ÉCOLE",
    "\u00a0nbsp",
    "\u200b zero",
    "tab\tsep",
    "...!?",
    "@user #tag",
    "100,000",
    "v2.0-beta",
    "Ω≈ç√",
    " ",
]


def strings():
    """300 strings: the pieces alone and in pairs."""
    random = np.random.default_rng(0)
    pairs = ["".join(random.choice(PIECES, 2)) for _ in range(300 - len(PIECES))]
    return PIECES + pairs


def converted(src, tmp_path, **options):
    report = convert(src, tmp_path / "out.hsr", "f32", **options)
    return ReadBack(tmp_path / "out.hsr"), report


def tokenizer_of(back):
    return Tokenizer.from_str(back.metadata["tokenizer.huggingface.json"])


def refused(src, tmp_path, text, **options):
    with pytest.raises(ConvertError, match=text):
        convert(src, tmp_path / "refused.hsr", "f32", **options)
    assert not (tmp_path / "refused.hsr").exists()


# ---- folders ----------------------------------------------------------------------------------------------------


def test_tokenizer_json_is_kept_letter_by_letter(tmp_path):
    text = tiny.tokenizer_json() + "\n "
    back, _ = converted(tiny.write_hf(tmp_path / "hf", tokenizer=text), tmp_path)
    assert back.metadata["tokenizer.huggingface.json"] == text


@pytest.mark.parametrize("name", ["tokenizer.model", "tekken.json", "vocab.json"])
def test_other_tokenizer_formats_are_refused_by_name(tmp_path, name):
    src = tiny.write_hf(tmp_path / "hf", tokenizer=None)
    (src / name).write_bytes(b"x")
    refused(src, tmp_path, f"only as {name}")


EMPTY = Tokenizer(models.BPE()).to_str()


@pytest.mark.parametrize("text", ["{", "[]", '{"version": "1.0"}', EMPTY])
def test_broken_tokenizer_fails_at_conversion(tmp_path, text):
    refused(tiny.write_hf(tmp_path / "hf", tokenizer=text), tmp_path, "tokenizer.json")


@pytest.mark.parametrize(
    "generation, config, tokenizer, expected",
    [
        ([7, 8], 7, tiny.TURN, [7, 8, 2]),
        (7, [8, 9], None, [7, 8, 9]),
        (None, 5, None, [5]),
        (tiny.NULL, tiny.NULL, tiny.EOS, [1]),
        (None, None, None, None),
        (7, 7, {"content": tiny.EOS, "lstrip": False}, [7, 1]),
        ([], [], None, None),
    ],
)
def test_end_ids_of_all_files_are_joined(tmp_path, generation, config, tokenizer, expected):
    """generation_config.json, config.json and the tokenizer each name end ids, as a number, a list or null."""
    value = None if generation is tiny.NULL else generation
    src = tiny.write_hf(
        tmp_path / "hf",
        tiny.config(eos_token_id=config),
        tokenizer_config={"eos_token": tokenizer},
        generation_config={"eos_token_id": value},
    )
    found = converted(src, tmp_path)[0].get("eos_token_ids")
    assert (None if found is None else found.tolist()) == expected


@pytest.mark.parametrize("eos, text", [("5", 'eos_token_id is "5"'), ([True], "eos_token_id"), (list(range(17)), "17 end-of-text ids")])
def test_impossible_end_ids(tmp_path, eos, text):
    refused(tiny.write_hf(tmp_path / "hf", tiny.config(eos_token_id=eos)), tmp_path, text)


def test_end_id_outside_the_vocabulary_is_dropped_with_a_warning(tmp_path):
    back, report = converted(tiny.write_hf(tmp_path / "hf", tiny.config(eos_token_id=[1, 5000])), tmp_path)
    assert back.get("eos_token_ids").tolist() == [1] and any("5000" in text for text in report.warnings)


@pytest.mark.parametrize(
    "in_config, in_file, expected",
    [
        ("A", None, "A"),
        ("A", "B", "B"),
        (None, "B", "B"),
        (None, None, None),
        ([{"name": "tool", "template": "T"}, {"name": "default", "template": "D"}], None, "D"),
        ([{"name": "tool", "template": "T"}], None, None),
        ([{"name": ["tool"], "template": "T"}, {"template": "U"}], None, None),
    ],
)
def test_chat_template_is_found_where_it_lives(tmp_path, in_config, in_file, expected):
    """The file of its own wins; a list is searched for the default; none is none, never a foreign one."""
    settings = {} if in_config is None else {"chat_template": in_config}
    back, _ = converted(tiny.write_hf(tmp_path / "hf", tokenizer_config=settings, chat_template=in_file), tmp_path)
    assert back.metadata.get("tokenizer.chat_template") == expected


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "generation_config.json", "special_tokens_map.json",
                                  "chat_template.jinja"])
def test_a_link_that_leads_nowhere_is_no_missing_file(tmp_path, name):
    """A download into a cache of links that broke: without its end ids or template the model would run all the same."""
    src = tiny.write_hf(tmp_path / "hf")
    (src / name).unlink(missing_ok=True)
    (src / name).symlink_to("../blobs/0")
    refused(src, tmp_path, f"cannot open .*{name}: No such file")


def test_special_tokens_and_sampling_defaults(tmp_path):
    settings = {
        "bos_token": {"content": tiny.BOS},
        "eos_token": tiny.EOS,
        "pad_token": None,
        "extra_special_tokens": {"turn_token": tiny.TURN},
    }
    generation = {"temperature": 0.6, "top_p": 0.9, "do_sample": True, "eos_token_id": 1, "transformers_version": "5"}
    src = tiny.write_hf(tmp_path / "hf", tiny.config(bos_token_id=None), tokenizer_config=settings, generation_config=generation)
    (src / "special_tokens_map.json").write_text(json.dumps({"unk_token": tiny.TURN, "pad_token": tiny.TURN}))
    back, _ = converted(src, tmp_path)
    expected = {"bos_token": tiny.BOS, "eos_token": tiny.EOS, "unk_token": tiny.TURN, "turn_token": tiny.TURN}
    assert json.loads(back.get("special_tokens")) == expected
    assert json.loads(back.get("generation")) == {"temperature": 0.6, "top_p": 0.9, "do_sample": True}
    assert back.get("bos_token_id") == 0


def test_script_model_recites(tmp_path):
    """The script model converts and says what it was written to say."""
    src = tiny.script_model(tmp_path / "hf", {5: 9, 9: 200, 200: 1})
    back, _ = converted(src, tmp_path)
    assert back.logits([5, 9, 200]).argmax(axis=-1).tolist() == [9, 200, 1]


# ---- byte-level tokenizers of GGUF files ------------------------------------------------------------------------

LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN2 = LLAMA3.replace("{1,3}", "")


def original(pre):
    """The tokenizer the GGUF file was made of, by the published pattern of its family."""
    tokenizer = Tokenizer.from_str(tiny.tokenizer_json())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if pre == "smollm":
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    if pre in ("llama-bpe", "qwen2"):
        pattern = Regex(LLAMA3 if pre == "llama-bpe" else QWEN2)
        plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(pattern, "isolated"), plain])
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    return tokenizer


@pytest.mark.parametrize("pre", ["gpt-2", "smollm", "llama-bpe", "qwen2"])
def test_gguf_tokenizer_is_the_original_one(tmp_path, pre):
    """Same ids and same text back on 300 strings."""
    keys = {"tokenizer.ggml.pre": pre, "tokenizer.ggml.add_bos_token": False}
    ours, theirs = tokenizer_of(converted(tiny.write_gguf(tmp_path / "m.gguf", keys=keys), tmp_path)[0]), original(pre)
    for text in strings():
        ids = theirs.encode(text, add_special_tokens=False).ids
        assert ours.encode(text).ids == ids, text
        assert ours.decode(ids, skip_special_tokens=False) == theirs.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize("pre", [None, "default", "mystery"])
def test_unknown_splitting_is_refused_or_loudly_allowed(tmp_path, pre):
    """An absent or unknown tag means text would be split wrongly."""
    src = tiny.write_gguf(tmp_path / "m.gguf", keys={"tokenizer.ggml.pre": pre})
    refused(src, tmp_path, "pre-tokenizer" if pre is None else repr(pre))
    _, report = converted(src, tmp_path, allow_unknown_pretokenizer=True)
    assert any("GPT-2" in text for text in report.warnings)


@pytest.mark.parametrize("pre, whole", [("llama-bpe", True), ("tekken", True), ("gpt-2", False), ("qwen2", False)])
def test_families_that_take_whole_words_before_merging(tmp_path, pre, whole):
    """A word that is a token of its own, but that no merges lead to."""
    keys = tiny.gguf_tokenizer(pre)
    kinds = [*keys["tokenizer.ggml.token_type"][1], 1]
    keys |= {"tokenizer.ggml.tokens": [*keys["tokenizer.ggml.tokens"], "Ġzebra"], "tokenizer.ggml.token_type": ("INT32", kinds)}
    src = tiny.write_gguf(tmp_path / "m.gguf", tiny.config(vocab_size=321), keys=keys)
    tokenizer = tokenizer_of(converted(src, tmp_path)[0])
    assert (320 in tokenizer.encode("a zebra").ids) == whole


@pytest.mark.parametrize("add_bos", [True, False, None])
@pytest.mark.parametrize("add_eos", [True, False])
@pytest.mark.parametrize("pre", ["gpt-2", "llama-bpe"])
def test_begin_and_end_tokens_are_put_by_the_tokenizer(tmp_path, add_bos, add_eos, pre):
    """Exactly one begin token where the file or its family says so, and none when special tokens are not wanted."""
    keys = {"tokenizer.ggml.pre": pre, "tokenizer.ggml.add_bos_token": add_bos, "tokenizer.ggml.add_eos_token": add_eos}
    tokenizer = tokenizer_of(converted(tiny.write_gguf(tmp_path / "m.gguf", keys=keys), tmp_path)[0])
    plain = tokenizer.encode("hello", add_special_tokens=False).ids
    begins = add_bos if add_bos is not None else pre == "llama-bpe"
    assert tokenizer.encode("hello").ids == [0] * begins + plain + [1] * add_eos
    assert plain == original(pre).encode("hello").ids
    assert len(tokenizer.encode("hello", "world").ids) == len(plain) + len(tokenizer.encode("world", add_special_tokens=False).ids) + 2 * (
        begins + add_eos
    )


def test_end_ids_of_a_gguf_are_joined(tmp_path):
    keys = {"tokenizer.ggml.eot_token_id": 2, "tokenizer.ggml.eom_token_id": 7, "tokenizer.ggml.padding_token_id": 2}
    back, _ = converted(tiny.write_gguf(tmp_path / "m.gguf", keys=keys), tmp_path)
    assert back.get("eos_token_ids").tolist() == [1, 2, 7] and back.get("bos_token_id") == 0
    assert json.loads(back.get("special_tokens")) == {"bos_token": tiny.BOS, "eos_token": tiny.EOS, "pad_token": tiny.TURN}


def test_chat_template_and_sampling_of_a_gguf(tmp_path):
    keys = {"tokenizer.chat_template": "T", "general.sampling.temp": 0.6, "general.sampling.top_k": 40}
    back, _ = converted(tiny.write_gguf(tmp_path / "m.gguf", keys=keys), tmp_path)
    assert back.metadata["tokenizer.chat_template"] == "T"
    assert json.loads(back.get("generation")) == {"temperature": 0.6, "top_k": 40}


def test_unused_tokens_at_the_end_are_padding(tmp_path):
    keys = tiny.gguf_tokenizer()
    kinds = list(keys["tokenizer.ggml.token_type"][1])
    more = {
        "tokenizer.ggml.tokens": keys["tokenizer.ggml.tokens"] + [f"[PAD{i}]" for i in range(32)],
        "tokenizer.ggml.token_type": ("INT32", kinds + [5] * 32),
    }
    back, _ = converted(tiny.write_gguf(tmp_path / "m.gguf", tiny.config(vocab_size=352), keys=more), tmp_path)
    assert (back.get("vocab_size"), back.get("tokenizer_size")) == (352, 320)
    assert tokenizer_of(back).token_to_id("[PAD0]") is None


def test_user_defined_tokens_are_text_and_control_tokens_are_not(tmp_path):
    kinds = list(tiny.gguf_tokenizer()["tokenizer.ggml.token_type"][1])
    kinds[2] = 4
    back, _ = converted(tiny.write_gguf(tmp_path / "m.gguf", keys={"tokenizer.ggml.token_type": ("INT32", kinds)}), tmp_path)
    tokenizer = tokenizer_of(back)
    assert tokenizer.encode(tiny.TURN + tiny.EOS).ids == [2, 1]
    assert tokenizer.decode([2, 1]) == tiny.TURN


@pytest.mark.parametrize(
    "keys, text",
    [
        ({"tokenizer.ggml.tokens": None}, "tokens' is missing"),
        ({"tokenizer.ggml.merges": None}, "merges' is missing"),
        ({"tokenizer.ggml.merges": ["ab"]}, "not two tokens"),
        ({"tokenizer.ggml.merges": ["zz qq"]}, "cannot be built"),
        ({"tokenizer.ggml.token_type": ("INT32", [1])}, "token_type' has 1 values for 320 tokens"),
        ({"tokenizer.ggml.model": "bert"}, "'bert'"),
        ({"tokenizer.ggml.eos_token_id": 320}, "eos_token_id' is 320"),
        ({"tokenizer.ggml.eos_token_id": ("INT32", [1, 2])}, r"eos_token_id' is array\(\[1, 2\].*, not one of the 320"),
        ({"tokenizer.ggml.tokens": ["a"] * 320}, "holds tokens twice: 'a'"),
        ({"tokenizer.ggml.add_bos_token": 1}, "add_bos_token' is not a truth value"),
        ({"tokenizer.ggml.tokens": ("UINT32", [1] * 320)}, "not an array of strings"),
    ],
)
def test_broken_gguf_tokenizers(tmp_path, keys, text):
    refused(tiny.write_gguf(tmp_path / "m.gguf", keys=keys), tmp_path, text)


def test_gguf_without_a_tokenizer(tmp_path):
    back, report = converted(tiny.write_gguf(tmp_path / "m.gguf", tokenizer=False), tmp_path)
    assert "tokenizer.huggingface.json" not in back.metadata and any("token ids only" in text for text in report.warnings)


# ---- sentencepiece tokenizers of GGUF files ---------------------------------------------------------------------

WORDS = "▁the quick ▁quick ▁fox the he th ▁t qu ick ck ic in ing ▁in er re on ▁a an nd ▁and aa aaa aaaa ▁▁ ▁▁▁▁".split(" ")


def spm_keys():
    """A small sentencepiece vocabulary: unknown, begin, end, 256 bytes, letters, and pieces scored by their rank."""
    letters = sorted(set("▁abcdefghijklmnopqrstuvwxyzé.,!"))
    tokens = ["<unk>", "<s>", "</s>"] + [f"<0x{i:02X}>" for i in range(256)] + WORDS + letters
    count = len(tokens)
    kinds = [2, 3, 3] + [6] * 256 + [1] * (count - 259)
    scores = [0.0] * 259 + [-float(i) for i in range(count - 259)]
    return {
        "tokenizer.ggml.model": "llama", "tokenizer.ggml.pre": None, "tokenizer.ggml.merges": None, "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": ("FLOAT32", scores), "tokenizer.ggml.token_type": ("INT32", kinds),
        "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.unknown_token_id": 0,
    }  # fmt: skip


def spm_encode(keys, text):
    """The rule itself: merge the neighbours that make the best-scored piece, leftmost first; what is left over becomes bytes."""
    ids = {token: i for i, token in enumerate(keys["tokenizer.ggml.tokens"])}
    scores, kinds = keys["tokenizer.ggml.scores"][1], keys["tokenizer.ggml.token_type"][1]
    pieces = list("▁" + text.replace(" ", "▁"))
    while True:
        joined = [(-scores[ids[a + b]], i) for i, (a, b) in enumerate(zip(pieces, pieces[1:])) if kinds[ids.get(a + b, 0)] == 1]
        if not joined:
            break
        _, i = min(joined)
        pieces[i : i + 2] = [pieces[i] + pieces[i + 1]]
    result = []
    for piece in pieces:
        result += [ids[piece]] if piece in ids else [ids[f"<0x{byte:02X}>"] for byte in piece.encode()]
    return result


SPM_TEXTS = [
    "the quick fox",
    "thethe  and    then",
    "aaaaaaaaa aaaaa",
    "in an inning",
    "日本 é!",
    "🙂",
    " lead",
    "trail ",
    "a\nb",
    "quicken, other.",
    "x" * 50,
    " ",
]


def test_sentencepiece_vocabulary(tmp_path):
    keys = spm_keys()
    cfg = tiny.config(vocab_size=len(keys["tokenizer.ggml.tokens"]))
    back, _ = converted(tiny.write_gguf(tmp_path / "m.gguf", cfg, keys=keys), tmp_path)
    tokenizer = tokenizer_of(back)
    for text in SPM_TEXTS:
        assert tokenizer.encode(text).ids == [1, *spm_encode(keys, text)], text
        assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert tokenizer.encode("</s>the", add_special_tokens=False).ids == [2, *spm_encode(keys, "the")]


def test_sentencepiece_without_a_prefix_space(tmp_path):
    keys = spm_keys() | {"tokenizer.ggml.add_space_prefix": False, "tokenizer.ggml.add_bos_token": False}
    cfg = tiny.config(vocab_size=len(keys["tokenizer.ggml.tokens"]))
    tokenizer = tokenizer_of(converted(tiny.write_gguf(tmp_path / "m.gguf", cfg, keys=keys), tmp_path)[0])
    assert tokenizer.encode("the quick").tokens == ["the", "▁quick"]
    assert tokenizer.decode(tokenizer.encode(" the quick").ids) == " the quick"
