# SPDX-License-Identifier: Apache-2.0
"""The Python front on real, tiny models: results, errors, threads, endings."""

from __future__ import annotations

import asyncio
import copy
import functools
import gc
import itertools
import logging
import os
import pickle
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import hisparse_rt as hs
import numpy as np
import pytest
import tiny
from hisparse_rt.checks import integer
from hisparse_rt.ids import as_ids
from hisparse_rt.sizes import format_size, parse_size
from tokenizers import Tokenizer, processors

TEMPLATE = (
    "{% for m in messages %}<|turn|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)
TOKENIZER = Tokenizer.from_str(tiny.tokenizer_json())
PROMPTS = ["The quick", "hello world", "x", "cats and", "def square(x):"]


@pytest.fixture(scope="session")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="session")
def random_folder(tmp_path_factory):
    """Random weights: output is noise, but every token of the past counts."""
    cfg = tiny.config(max_position_embeddings=4096, eos_token_id=tiny.NULL)
    return tiny.write_hf(tmp_path_factory.mktemp("random"), cfg, tiny.weights(cfg), chat_template=TEMPLATE)


@pytest.fixture(scope="session")
def random_path(random_folder, cache):
    with hs.load(random_folder, dtype="f32", cache_dir=cache, threads=1, calibration=False) as model:
        return model.path


@pytest.fixture(scope="session")
def shared(random_path):
    with hs.load(random_path, ram="64MiB", threads=2) as model:
        yield model


@pytest.fixture
def model(shared):
    """The shared model; every test must leave it as it was."""
    before = counters(shared)
    yield shared
    gc.collect()
    assert counters(shared) == before


def counters(model):
    stats = model.stats()
    return stats.n_sessions, stats.hot_blocks_used, stats.hot_blocks_reserved, stats.hot_slots_used


@pytest.fixture(scope="session")
def script(tmp_path_factory, cache):
    """A function: text -> a model that says it after the prompt 'Z', one byte per token, and then ends."""
    models = []

    def make(text: str, **files) -> hs.Model:
        ids = [TOKENIZER.token_to_id("Z"), *one_per_byte(text), 1]
        assert len(set(ids)) == len(ids), "a token has one successor only"
        folder = tiny.script_model(tmp_path_factory.mktemp("script"), dict(itertools.pairwise(ids)), **files)
        models.append(hs.load(folder, dtype="f32", cache_dir=cache, threads=1, ram="16MiB"))
        return models[-1]

    yield make
    for model in models:
        model.close()


def one_per_byte(text: str) -> list[int]:
    ids: list[int] = []
    for character in text:
        found = TOKENIZER.encode(character, add_special_tokens=False).ids
        assert len(found) == len(character.encode()), f"{character!r} has a token of its own"
        ids += found
    return ids


def run_python(code: str, *arguments: str, **options) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", textwrap.dedent(code), *arguments], capture_output=True, text=True, timeout=120, **options)


# ---- arguments --------------------------------------------------------------------------------------------------


def test_sizes() -> None:
    assert [parse_size(text) for text in ("4GiB", "512M", "1.5GB", "100", "2 kb", 7)] == [4 << 30, 512 << 20, 1500000000, 100, 2000, 7]
    for bad in ("", "GiB", "4Gib/s", "-1", "1e9", "4XB", True, 1.5, None, -1, 1 << 63):
        with pytest.raises(hs.InvalidError):
            parse_size(bad)
    assert format_size(1536) == "1.5 KiB" and format_size(12) == "12 B" and format_size(5 << 40) == "5.0 TiB"


@pytest.mark.parametrize("value", [[1, 2], (1, 2), np.array([1, 2]), np.array([1, 2], np.uint8), [np.int64(1), np.int32(2)], range(1, 3)])
def test_ids_of_every_integer_kind(value) -> None:
    assert as_ids(value).tolist() == [1, 2] and as_ids(value).dtype == np.int32


@pytest.mark.parametrize(
    "value", [[True], [1.0], np.array([1.0]), np.array([True]), np.array([[1]]), np.array(1), ["1"], "1", [[1]], None, [np.bool_(1)]]
)
def test_what_is_no_id_is_refused(value) -> None:
    with pytest.raises(TypeError):
        as_ids(value)


@pytest.mark.parametrize("value", [[-1], [1 << 31], np.array([1 << 40]), [1 << 100]])
def test_ids_outside_every_vocabulary(value) -> None:
    with pytest.raises(hs.TokenError):
        as_ids(value)


def test_integers() -> None:
    assert integer("n", np.int8(3), 0, 5) == 3
    for bad in (True, 1.0, "1", None):
        with pytest.raises(TypeError, match="n must be"):
            integer("n", bad, 0, 5)
    with pytest.raises(hs.InvalidError, match="n is 6"):
        integer("n", 6, 0, 5)


# ---- loading ----------------------------------------------------------------------------------------------------


def test_info(model) -> None:
    info = model.info
    assert (info.arch, info.dtype, info.vocab_size, info.n_layers, info.head_dim) == ("llama", "f32", tiny.VOCAB, 2, 16)
    assert info.bos_token == 0 and info.eos_tokens == () and info.weight_bytes > 0 and info.n_params > 0
    assert model.generation_defaults == {}


def test_a_folder_is_converted_once(random_folder, tmp_path) -> None:
    options = {"dtype": "f32", "cache_dir": tmp_path, "threads": 1, "calibration": False}
    with hs.load(random_folder, **options) as model:
        first = os.stat(model.path)
    with hs.load(random_folder, **options) as model:
        assert os.stat(model.path).st_mtime_ns == first.st_mtime_ns
    assert len(list(tmp_path.glob("*.hsr"))) == 1
    os.utime(random_folder / "config.json")  # the source changed
    with hs.load(random_folder, **options) as model:
        assert len(list(tmp_path.glob("*.hsr"))) == 2


def test_a_gguf_file_loads_too(tmp_path) -> None:
    tiny.write_gguf(tmp_path / "m.gguf")
    with hs.load(tmp_path / "m.gguf", cache_dir=tmp_path / "c", threads=1) as model:
        assert model.info.dtype == "q8" and isinstance(hs.generate(model, "x", max_tokens=2), str)


def test_loads_at_the_same_time_make_one_file(random_folder, tmp_path) -> None:
    errors: list[BaseException] = []

    def work() -> None:
        try:
            hs.load(random_folder, cache_dir=tmp_path, threads=1).close()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors and len(list(tmp_path.glob("*.hsr"))) == 1


def test_the_cache_follows_xdg(random_folder, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with hs.load(random_folder, threads=1, calibration=False) as model:
        assert Path(model.path).parent == tmp_path / "hisparse_rt"


@pytest.mark.parametrize("name", ["with space", "[x]{y}", "模型", "e\u0301", "-dash"])
def test_odd_paths(random_path, tmp_path, name) -> None:
    path = tmp_path / name / "m.hsr"
    path.parent.mkdir()
    os.link(random_path, path)
    for form in (path, str(path), os.fsencode(path)):
        with hs.load(form, threads=1, ram="8MiB") as model:
            assert model.info.arch == "llama"


def test_a_path_that_is_no_text(random_path, tmp_path) -> None:
    path = os.fsencode(tmp_path) + b"/\xff.hsr"
    os.link(random_path, path)
    hs.load(path, threads=1, ram="8MiB").close()
    with pytest.raises(hs.FileMissingError) as caught:
        hs.load(path + b"x", threads=1)
    str(caught.value).encode("utf-8")


def test_a_missing_file_is_a_file_not_found_error(tmp_path) -> None:
    for name in ("no.hsr", "no.gguf"):
        with pytest.raises(FileNotFoundError, match=re.escape(name)) as caught:
            hs.load(tmp_path / name)
        assert isinstance(caught.value, hs.HisparseError) and caught.value.status == -4 and caught.value.errno == 2


def test_bad_files_and_options_are_refused(random_path, random_folder, tmp_path) -> None:
    (tmp_path / "junk.hsr").write_bytes(b"junk" * 100)
    with pytest.raises(hs.FormatError, match=r"junk\.hsr"):
        hs.load(tmp_path / "junk.hsr")
    for options, text in (
        ({"isa": "sse"}, "isa"), ({"kv": "int3"}, "kv"), ({"threads": -1}, "threads"), ({"threads": 5000}, "threads"),
        ({"chunk": 0}, "chunk"), ({"ram": "lots"}, "size"), ({"ram": 0}, "1 MiB"), ({"ram": 1 << 20, "hot": 1 << 20}, "both"),
        ({"dtype": "q8"}, "dtype"), ({"max_sessions": 0}, "max_sessions"),
    ):  # fmt: skip
        with pytest.raises(hs.InvalidError, match=text):
            hs.load(random_path, **options)
    with pytest.raises(hs.InvalidError, match="q3"):
        hs.load(random_folder, dtype="q3", cache_dir=tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(hs.FormatError, match=r"config\.json"):
        hs.load(tmp_path / "empty", cache_dir=tmp_path)


def test_the_log_goes_to_a_logger(random_path) -> None:
    lines: list[str] = []
    logger = logging.Logger("test", logging.DEBUG)
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    with hs.load(random_path, threads=2, ram="8MiB", log=logger) as model:
        hs.generate(model, "x", max_tokens=2)
    for line in lines:
        assert line and "\n" not in line


# ---- logits -----------------------------------------------------------------------------------------------------


def test_logits_in_any_chunks_have_the_same_bits(model, random_path) -> None:
    ids = np.arange(3, 90)
    whole = model.logits(ids)
    assert whole.shape == (87, tiny.VOCAB) and whole.dtype == np.float32 and np.isfinite(whole).all()
    for chunk in (1, 5, 7, 64):
        assert model.logits(ids, chunk).tobytes() == whole.tobytes()
    with hs.load(random_path, threads=1, chunk=5, ram="8MiB", debug_async=True) as other:
        assert other.logits(ids).tobytes() == whole.tobytes()


def test_logits_lead_to_the_greedy_tokens(model) -> None:
    details = hs.generate(model, [5, 6, 7], max_tokens=8, return_details=True)
    logits = model.logits([5, 6, 7, *details.tokens])
    assert logits[2:-1].argmax(axis=1).tolist() == list(details.tokens)


def test_logits_refuse(model) -> None:
    with pytest.raises(ValueError, match="no ids"):
        model.logits([])
    with pytest.raises(hs.TokenError, match="320"):
        model.logits([1, 320])
    with pytest.raises(hs.ContextError):
        model.logits([1] * 4097)
    with pytest.raises(hs.InvalidError, match="chunk"):
        model.logits([1], chunk=0)
    assert model.logits([1] * 4097, beyond_trained=True).shape[0] == 4097


# ---- generate ---------------------------------------------------------------------------------------------------


def test_text_stream_and_details_agree(model) -> None:
    text = hs.generate(model, "The quick", max_tokens=40)
    stream = hs.generate(model, "The quick", max_tokens=40, stream=True)
    assert "".join(stream) == text == stream.text
    details = hs.generate(model, "The quick", max_tokens=40, return_details=True)
    assert (details.text, details.finish_reason, len(details.tokens), details.logprobs) == (text, "length", 40, None)
    assert model.decode(details.tokens) == text
    assert details.prompt_tokens == details.prefill_tokens == model.encode("The quick").size
    assert details.kv_bytes > 0 and details.decode_seconds > 0
    assert stream.result.tokens == details.tokens == tuple(stream.tokens)


def test_ids_in_numpy_and_lists_are_prompts(model) -> None:
    ids = model.encode("hello world")
    wanted = hs.generate(model, "hello world", max_tokens=5)
    for form in (ids, ids.tolist(), ids.astype(np.uint16), tuple(ids.tolist())):
        assert hs.generate(model, form, max_tokens=5) == wanted
    for bad in ([1.5], [True], None, 7, b"x", {"a": 1}):
        with pytest.raises(TypeError):
            hs.generate(model, bad)


def test_a_list_gives_what_each_gives_alone(model) -> None:
    alone = [hs.generate(model, prompt, max_tokens=20, temperature=0.9, seed=4) for prompt in PROMPTS]
    assert hs.generate(model, PROMPTS, max_tokens=20, temperature=0.9, seed=4) == alone
    assert model.stats().last_batch_rows >= 1
    seeds = [3, 4, 5, 6, 7]
    mixed = hs.generate(model, PROMPTS, max_tokens=20, temperature=0.9, seed=seeds, return_details=True)
    assert [item.seed for item in mixed] == seeds and mixed[1].text == alone[1]
    assert hs.generate(model, [[5, 6], "x", np.array([7])], max_tokens=3)[1] == hs.generate(model, "x", max_tokens=3)
    with pytest.raises(hs.InvalidError, match="seeds"):
        hs.generate(model, PROMPTS, seed=[1])


def test_a_long_list_runs_through_a_small_pool(random_path) -> None:
    prompts = [f"{i} cats" for i in range(30)]
    with hs.load(random_path, threads=1, ram="2MiB", max_sessions=3) as small, hs.load(random_path, threads=1) as big:
        assert hs.generate(small, prompts, max_tokens=6) == hs.generate(big, prompts, max_tokens=6)
        with pytest.raises(hs.NoSpaceError):
            hs.generate(small, [5] * 3000, max_tokens=1)
        results = hs.generate(small, ["x", [5] * 3000, "y"], max_tokens=2, return_exceptions=True)
        assert isinstance(results[1], MemoryError) and results[0] == hs.generate(big, "x", max_tokens=2)
        assert counters(small)[0] == 0


def test_a_bad_prompt_in_a_list(model) -> None:
    with pytest.raises(hs.TokenError) as caught:
        hs.generate(model, ["x", [9999]], max_tokens=2)
    assert "9999" in str(caught.value)
    steps = model.stats().n_steps
    with pytest.raises(ValueError, match="empty") as empty:
        hs.generate(model, ["x", ""], max_tokens=2)
    assert model.stats().n_steps == steps and "prompt 1" in empty.value.__notes__[0]
    results = hs.generate(model, ["x", "", [9999], "y"], max_tokens=2, return_exceptions=True)
    assert [type(item) for item in results] == [str, hs.InvalidError, hs.TokenError, str]
    with pytest.raises(hs.InvalidError, match="one prompt"):
        hs.generate(model, ["x"], stream=True)


def test_seeds(model) -> None:
    def draw(**options):
        return hs.generate(model, "x", max_tokens=16, temperature=1.5, return_details=True, **options)

    first = draw(seed=7)
    draw()
    assert draw(seed=7).tokens == first.tokens and first.seed == 7
    free = draw()
    assert free.tokens != first.tokens and draw(seed=free.seed).tokens == free.tokens


def test_logprobs(model) -> None:
    details = hs.generate(model, [5, 6], max_tokens=4, logprobs=3, return_details=True)
    logits = model.logits([5, 6, *details.tokens]).astype(np.float64)
    table = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    for i, entry in enumerate(details.logprobs):
        row = table[1 + i]
        assert entry.token == details.tokens[i] == entry.top[0][0]
        assert entry.logprob == pytest.approx(row[entry.token], abs=1e-4)
        assert [token for token, _ in entry.top] == np.argsort(-row, kind="stable")[:3].tolist()
    assert hs.generate(model, [5], max_tokens=2, logprobs=0, return_details=True).logprobs[0].top == ()


def test_bias_and_bans(model) -> None:
    assert hs.generate(model, [5], max_tokens=3, logit_bias={9: 1e4}, return_details=True).tokens == (9, 9, 9)
    first = hs.generate(model, [5], max_tokens=1, return_details=True).tokens[0]
    assert hs.generate(model, [5], max_tokens=1, logit_bias={first: -np.inf}, return_details=True).tokens[0] != first


@pytest.mark.parametrize(
    ("options", "kind", "text"),
    [
        ({"temperature": -1.0}, ValueError, "temperature"), ({"temperature": float("nan")}, ValueError, "temperature"),
        ({"temperature": "hot"}, TypeError, "temperature"), ({"top_p": 0.0}, ValueError, "top_p"), ({"top_p": 1.01}, ValueError, "top_p"),
        ({"min_p": 1.1}, ValueError, "min_p"), ({"top_k": -1}, ValueError, "top_k"), ({"top_k": 1.5}, TypeError, "top_k"),
        ({"repetition_penalty": 0.0}, ValueError, "repetition_penalty"), ({"max_tokens": -1}, ValueError, "max_tokens"),
        ({"max_tokens": 1 << 31}, ValueError, "max_tokens"), ({"max_tokens": True}, TypeError, "max_tokens"),
        ({"seed": -1}, ValueError, "seed"), ({"seed": 1 << 64}, ValueError, "seed"), ({"logprobs": 21}, ValueError, "logprobs"),
        ({"stop": ""}, ValueError, "stop"), ({"stop": [5]}, TypeError, "stop"), ({"stop_tokens": list(range(40))}, ValueError, "stop"),
        ({"logit_bias": {-1: 1.0}}, ValueError, "bias"), ({"logit_bias": {320: 1.0}}, ValueError, "bias"),
        ({"logit_bias": {1 << 31: 1.0}}, ValueError, "bias"), ({"logit_bias": {1: float("nan")}}, ValueError, "bias"),
        ({"warmth": 1}, TypeError, "warmth"), ({"kv": "f8"}, ValueError, "kv"), ({"context": 0}, ValueError, "context"),
    ],
)  # fmt: skip
def test_bad_options_are_named_before_anything_is_computed(model, options, kind, text) -> None:
    steps = model.stats().n_steps
    with pytest.raises(kind, match=text):
        hs.generate(model, "x" * 2000, **options)
    assert model.stats().n_steps == steps


def test_an_unknown_option_is_answered_with_those_there_are(model) -> None:
    with model.session() as session:
        session.append([5])
        for call in (functools.partial(hs.generate, model, "x"), functools.partial(hs.generate, model, ["x", "y"]),
                     functools.partial(model.chat, "x"), functools.partial(model.conversation().send, "x"), session.generate):
            with pytest.raises(TypeError, match="no option 'max_new_tokens'; the options of sampling are max_tokens, temperature"):
                call(max_new_tokens=3)


def test_configs_pickle() -> None:
    options = hs.Sampling(temperature=0.5, stop="x", logit_bias={3: 1.0}, seed=np.int64(4))
    assert pickle.loads(pickle.dumps(options)) == copy.deepcopy(options) == options


# ---- the borders of a request -----------------------------------------------------------------------------------


def test_no_tokens_asked_for(model) -> None:
    details = hs.generate(model, "The quick", max_tokens=0, return_details=True)
    assert (details.text, details.tokens, details.finish_reason, details.decode_seconds) == ("", (), "length", 0.0)
    session = model.session()
    session.append("The quick")
    assert session.generate(max_tokens=0) == "" and session.stats().n_computed == session.n_tokens
    session.close()


def test_an_empty_prompt(model, random_folder, tmp_path, cache) -> None:
    for empty in ("", [], np.array([], int)):
        with pytest.raises(ValueError, match="empty prompt"):
            hs.generate(model, empty)
    assert isinstance(hs.generate(model, " ", max_tokens=1), str)
    assert isinstance(model.chat("", max_tokens=1), str)
    with pytest.raises(ValueError, match="no messages"):
        model.chat([])
    with pytest.raises(ValueError, match="empty prompt"), model.session() as session:
        session.append("")


def test_an_empty_prompt_with_a_begin_token(tmp_path, cache) -> None:
    tokenizer = Tokenizer.from_str(tiny.tokenizer_json())
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{tiny.BOS} $A", special_tokens=[(tiny.BOS, 0)])
    folder = tiny.write_hf(tmp_path, tokenizer=tokenizer.to_str())
    with hs.load(folder, dtype="f32", cache_dir=cache, threads=1, ram="8MiB") as model:
        assert hs.generate(model, "", max_tokens=3) == hs.generate(model, [0], max_tokens=3)
        session = model.session()
        session.append("a")
        session.append("b")
        assert session.tokens.count(0) == 1


@pytest.mark.slow
def test_context_borders(model) -> None:
    for n, context in ((257, 256), (4097, None), (256, 256)):
        steps = model.stats().n_steps
        with pytest.raises(hs.ContextError, match=rf"{n}.*{context or 4096}"):
            hs.generate(model, [5] * n, context=context, max_tokens=1)
        assert model.stats().n_steps == steps
    details = hs.generate(model, [5] * 255, context=256, max_tokens=50, return_details=True)
    assert (len(details.tokens), details.finish_reason) == (1, "length")
    assert hs.generate(model, [5] * 256, context=256, max_tokens=0) == ""
    assert len(hs.generate(model, [5], context=8, max_tokens=50, return_details=True).tokens) == 7
    with pytest.raises(hs.ContextError, match="5000"):
        hs.generate(model, [5], context=5000)
    assert len(hs.generate(model, [5] * 4090, max_tokens=10, beyond_trained=True, return_details=True).tokens) == 10
    assert len(hs.generate(model, [5] * 4090, max_tokens=10, return_details=True).tokens) == 6


# ---- end tokens, stop strings, split characters -----------------------------------------------------------------


def test_the_script_and_its_end(script) -> None:
    model = script("👍é")
    details = hs.generate(model, "Z", return_details=True)
    assert (details.text, details.finish_reason, details.tokens[-1]) == ("👍é", "stop", 1)
    pieces = list(hs.generate(model, "Z", stream=True))
    assert pieces == ["👍", "é"]
    assert hs.generate(model, "Z", ignore_eos=True, max_tokens=8, return_details=True).finish_reason == "length"


def test_stop_tokens_end_and_are_not_shown(script) -> None:
    model = script("abcdef")
    d = TOKENIZER.token_to_id("d")
    details = hs.generate(model, "Z", stop_tokens=[d], return_details=True)
    assert (details.text, details.tokens[-1], details.finish_reason, details.stop) == ("abc", d, "stop", None)


@pytest.mark.parametrize(
    ("stop", "left", "matched"),
    [("cd", "ab", "cd"), ("a", "", "a"), (["ef", "bcd"], "a", "bcd"), (["bcx", "de"], "abc", "de"),
     ("Za", "abcdefgh", None), ("hi", "abcdefgh", None)],
)  # fmt: skip
def test_stop_strings(script, stop, left, matched) -> None:
    model = script("abcdefgh")
    details = hs.generate(model, "Z", stop=stop, return_details=True)
    stream = hs.generate(model, "Z", stop=stop, stream=True)
    assert "".join(stream) == details.text == left
    assert hs.generate(model, ["Z", "Z"], stop=stop) == [left, left]
    assert (details.stop, details.finish_reason) == (matched, "stop")


def test_a_stop_string_leaves_the_session_at_the_token_that_completed_it(script) -> None:
    model = script("abcdefgh")
    session = model.session()
    session.append("Z")
    assert session.generate(stop="cd") == "ab"
    assert model.decode(session.tokens) == "Zabcd"
    assert session.generate() == "efgh"
    session.close()


def test_text_that_ends_inside_a_character(script) -> None:
    assert hs.generate(script("a👍"), "Z", max_tokens=3) == "a\ufffd"


# ---- sessions ---------------------------------------------------------------------------------------------------


def test_a_session_grows_and_remembers(model) -> None:
    with model.session() as session:
        assert session.append("The quick") == session.n_tokens
        first = session.generate(max_tokens=5, return_details=True)
        session.append([7, 8])
        second = session.generate(max_tokens=5, return_details=True)
        whole = [*model.encode("The quick").tolist(), *first.tokens, 7, 8]
        assert session.tokens == [*whole, *second.tokens]
        assert hs.generate(model, whole, max_tokens=5, return_details=True).tokens == second.tokens
        assert second.prefill_tokens <= 3 + 1
        stats = session.stats()
        assert (stats.kv_format, stats.running, stats.context, stats.decode_tokens) == ("f32", False, 4096, 10)


def test_fork_truncate_rebuild(model) -> None:
    with model.session() as session:
        session.append([5, 6, 7, 8])
        session.prefill()
        with session.fork() as fork:
            a, b = session.generate(max_tokens=6, return_details=True), fork.generate(max_tokens=6, return_details=True)
            assert a.tokens == b.tokens
        session.truncate(4)
        assert session.tokens == [5, 6, 7, 8]
        session.rebuild()
        assert session.generate(max_tokens=6, return_details=True).tokens == a.tokens
        with pytest.raises(hs.InvalidError):
            session.truncate(999)
        with pytest.raises(TypeError, match="n must"):
            session.truncate(1.5)


def test_session_errors(model) -> None:
    with model.session(context=8) as session:
        with pytest.raises(hs.StateError):
            session.generate()
        with pytest.raises(hs.ContextError):
            session.append([5] * 9)
        with pytest.raises(hs.TokenError, match="320"):
            session.append([320])
        session.append([5] * 8)
        with pytest.raises(hs.ContextError):
            session.generate(max_tokens=1)
        with pytest.raises(hs.ContextError, match="8"):
            session.logits([1])
        assert session.tokens == [5] * 8
    with pytest.raises(hs.StateError, match="closed"):
        session.append([5])
    session.close()
    with pytest.raises(hs.ContextError, match="5000"):
        model.session(context=5000)


def test_prefill_reports_its_progress(model) -> None:
    calls: list[tuple[int, int]] = []
    with model.session() as session:
        session.append([5] * 1500)
        session.prefill(lambda done, total: calls.append((done, total)))
    assert calls[-1] == (1500, 1500) and len(calls) >= 3 and calls == sorted(calls)
    calls.clear()
    hs.generate(model, [5] * 1500, max_tokens=1, progress=lambda done, total: calls.append((done, total)))
    assert calls[-1] == (1500, 1500)


def test_an_exception_of_the_progress_function_ends_the_work(model) -> None:
    class Enough(Exception):
        pass

    def report(done: int, total: int) -> None:
        if done:
            raise Enough

    with pytest.raises(Enough):
        hs.generate(model, [5] * 3000, max_tokens=1, progress=report)
    with model.session() as session:
        session.append([5] * 3000)
        with pytest.raises(Enough):
            session.prefill(report)
        assert 0 < session.stats().n_computed < 3000


def test_a_long_prompt_gives_the_same_tokens(model) -> None:
    ids = np.random.default_rng(0).integers(3, tiny.VOCAB, 1800)
    with model.session() as session:
        for part in np.array_split(ids, 9):
            session.append(part)
            session.prefill()
        wanted = session.generate(max_tokens=5)
    assert hs.generate(model, ids, max_tokens=5) == wanted


# ---- streams that end early -------------------------------------------------------------------------------------


def running(model, **options) -> hs.Stream:
    return hs.generate(model, "The quick", max_tokens=500, stream=True, **options)


def test_a_stream_left_early_frees_its_session(model) -> None:
    before = counters(model)

    def leave_by_break() -> None:
        for _ in running(model):
            break

    def leave_by_error() -> None:
        with pytest.raises(KeyError):
            for _ in running(model):
                raise KeyError

    def leave_by_close() -> None:
        stream = running(model)
        next(stream)
        stream.close()
        assert counters(model) == before and stream.finish_reason is None
        assert list(stream) == []
        stream.close()

    def leave_by_throw() -> None:
        stream = running(model)
        with pytest.raises(KeyError):
            stream.throw(KeyError("x"))
        assert counters(model) == before

    def never_start() -> None:
        running(model)

    def leave_in_a_cycle() -> None:
        stream = running(model)
        next(stream)
        box = [stream]
        box.append(box)

    wanted = hs.generate(model, "cats", max_tokens=9)
    for leave in (leave_by_break, leave_by_error, leave_by_close, leave_by_throw, never_start, leave_in_a_cycle):
        leave()
        gc.collect()
        assert counters(model) == before, leave.__name__
        assert hs.generate(model, "cats", max_tokens=9) == wanted


def test_a_session_is_usable_after_a_stream_was_closed(model) -> None:
    with model.session() as session:
        session.append("The quick")
        n = session.n_tokens
        stream = session.generate(stream=True, max_tokens=500)
        next(stream)
        for call in (lambda: session.append([5]), lambda: session.generate(), lambda: session.fork(), lambda: session.truncate(0),
                     lambda: session.logits([5]), lambda: session.rebuild(), lambda: session.prefill()):  # fmt: skip
            with pytest.raises(hs.BusyError, match="stream"):
                call()
        delivered = len(stream.tokens)
        hs.generate(model, "cats", max_tokens=9)  # its steps sample ahead for the open stream
        assert session.n_tokens > n + delivered
        stream.close()
        assert session.n_tokens == n + delivered and not session.stats().running
        session.truncate(n)
        assert session.generate(max_tokens=9) == hs.generate(model, "The quick", max_tokens=9)


def test_a_session_closed_under_its_stream(model) -> None:
    session = model.session()
    session.append("x")
    stream = session.generate(stream=True)
    next(stream)
    session.close()
    with pytest.raises(hs.StateError, match="closed"):
        next(stream)
    assert list(stream) == []


def test_cancel_from_another_thread(model) -> None:
    session = model.session(context=4096)
    session.append([5])
    stream = session.generate(stream=True, max_tokens=4000)
    next(stream)
    threading.Timer(0.02, stream.cancel).start()
    with pytest.raises(hs.WorkCancelledError):
        for _ in stream:
            pass
    session.append([6])
    assert isinstance(session.generate(max_tokens=2), str)
    session.close()


def test_a_second_thread_on_one_session_is_told_so(model) -> None:
    session = model.session()
    session.append([5] * 4000)
    inside = threading.Event()
    thread = threading.Thread(target=lambda: session.prefill(lambda done, total: inside.set()))
    thread.start()
    inside.wait()
    seen: list[str] = []
    while thread.is_alive() and not seen:
        try:
            session.truncate(0)
        except (hs.BusyError, hs.StateError) as error:
            seen.append(type(error).__name__)
    thread.join()
    session.close()
    assert seen == ["BusyError"]


def test_a_second_thread_on_one_stream_does_not_end_it(model) -> None:
    stream = hs.generate(model, [5] * 4000, stream=True, max_tokens=3, progress=lambda done, total: inside.set())
    inside = threading.Event()
    first: list[str] = []
    thread = threading.Thread(target=lambda: first.extend(stream))
    thread.start()
    inside.wait()
    seen: list[str] = []
    while thread.is_alive() and not seen:
        try:
            stream.step()
        except hs.BusyError as error:
            seen.append(str(error))
    thread.join()
    assert len(seen) == 1 and stream.finish_reason == "length" and len(stream.tokens) == 3


def test_threads_that_share_a_stream_take_turns(model) -> None:
    """Each event goes to one of them, and the last one ends it for all."""
    stream = hs.generate(model, [5] * 600, stream=True, max_tokens=400)
    failures: list[BaseException] = []
    pieces: list[str] = []

    def read() -> None:
        while stream.finish_reason is None:
            try:
                pieces.append(next(stream, ""))
            except hs.BusyError:
                time.sleep(0)
            except BaseException as error:
                failures.append(error)
                return

    threads = [threading.Thread(target=read) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == [] and len(stream.tokens) == 400 and stream.finish_reason == "length"
    assert sorted(pieces) == sorted(stream._pieces + [""] * pieces.count(""))


def test_an_event_is_kept_before_the_next_is_read(model, monkeypatch) -> None:
    """Whoever comes while another thread has an event and has not kept it yet is refused, and takes nothing."""
    stream = hs.generate(model, "hello", stream=True, max_tokens=4, ignore_eos=True)
    take, tried = stream._session._next, []

    def take_and_be_interrupted(*arguments):
        status = take(*arguments)
        if not tried:
            with ThreadPoolExecutor(1) as other:
                tried.append(other.submit(next, stream))
        return status

    monkeypatch.setattr(stream._session, "_next", take_and_be_interrupted)
    assert len("".join(stream)) > 0 and len(stream.tokens) == 4
    with pytest.raises(hs.BusyError, match="another thread"):
        tried[0].result()


# ---- threads ----------------------------------------------------------------------------------------------------


def test_many_threads_get_the_tokens_of_single_runs(model) -> None:
    prompts = [f"{i} cats and {i * i} dogs" for i in range(8)]
    alone = [hs.generate(model, prompt, max_tokens=24, temperature=0.8, seed=i) for i, prompt in enumerate(prompts)]
    results: list[str | None] = [None] * 8

    def work(i: int) -> None:
        results[i] = hs.generate(model, prompts[i], max_tokens=24, temperature=0.8, seed=i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == alone


def test_other_threads_run_while_the_library_computes(model) -> None:
    """The interpreter lock is free during a step: a thread that wants it every 5 ms gets it."""
    late: list[float] = []
    stop = threading.Event()

    def tick() -> None:
        last = time.monotonic()
        while not stop.is_set():
            time.sleep(0.005)
            now = time.monotonic()
            late.append(now - last)
            last = now

    thread = threading.Thread(target=tick)
    thread.start()
    began = time.monotonic()
    model.logits(np.arange(4000) % tiny.VOCAB, chunk=4000)
    seconds = time.monotonic() - began
    stop.set()
    thread.join()
    assert len(late) >= 2 and sum(late) / len(late) < max(0.25 * seconds, 0.1)


def test_close_ends_the_work_of_other_threads(random_path) -> None:
    model = hs.load(random_path, threads=1, ram="64MiB")
    ended: list[str] = []

    def work() -> None:
        try:
            hs.generate(model, "x", max_tokens=4000)
        except hs.HisparseError as error:
            ended.append(type(error).__name__)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    while model.stats().decode_tokens < 10:
        time.sleep(0.001)
    model.close()
    for thread in threads:
        thread.join(30)
    assert len(ended) == 3 and set(ended) <= {"WorkCancelledError", "StateError"}


# ---- asyncio ----------------------------------------------------------------------------------------------------


def test_async_streams_give_the_same_text(model) -> None:
    async def main() -> tuple[str, str, str]:
        async def one(prompt: str) -> str:
            return "".join([piece async for piece in model.agenerate(prompt, max_tokens=20)])

        first, second = await asyncio.gather(one("The quick"), one("cats"))
        stream = model.achat("hello", max_tokens=20)
        third = await stream.read()
        assert stream.result.text == third
        return first, second, third

    assert asyncio.run(main()) == (
        hs.generate(model, "The quick", max_tokens=20), hs.generate(model, "cats", max_tokens=20), model.chat("hello", max_tokens=20),
    )  # fmt: skip


def test_the_event_loop_beats_while_computing(model) -> None:
    async def main() -> tuple[float, float]:
        worst = 0.0
        done = False
        began = time.monotonic()

        async def beat() -> None:
            nonlocal worst
            while not done:
                before = time.monotonic()
                await asyncio.sleep(0.01)
                worst = max(worst, time.monotonic() - before - 0.01)

        heart = asyncio.create_task(beat())
        async for _ in model.agenerate([5] * 3000, max_tokens=200):
            pass
        done = True
        await heart
        return worst, time.monotonic() - began

    worst, whole = asyncio.run(main())
    assert worst < max(0.5, whole / 2)


@pytest.mark.parametrize("n", [4000, 3])
def test_cancelling_a_task_stops_the_native_work(random_path, n) -> None:
    async def main(model: hs.Model) -> None:
        async def read() -> None:
            async for _ in model.agenerate([5] * n, max_tokens=1000, beyond_trained=True):
                pass

        task = asyncio.create_task(read())
        while model.stats().n_steps < 3:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        stats = model.stats()
        assert stats.n_sessions == 0 and stats.hot_blocks_used == 0
        assert stats.prefill_tokens < 4000 and stats.decode_tokens < 1000

    with hs.load(random_path, threads=1, isa="reference", chunk=8, ram="64MiB") as model:
        asyncio.run(main(model))


def test_async_streams_that_end_early(model) -> None:
    async def main() -> None:
        async with model.agenerate("x", max_tokens=1000) as stream:
            async for _ in stream:
                break
        assert model.stats().n_sessions == 0
        never = model.agenerate("x")
        await never.aclose()
        assert [piece async for piece in never] == []
        with pytest.raises(hs.TokenError):
            async for _ in model.agenerate([9999]):
                pass

    asyncio.run(main())


# ---- chat -------------------------------------------------------------------------------------------------------


def test_chat_goes_through_the_template(model) -> None:
    ids = model.chat_ids("hello", system="be brief")
    text = f"{tiny.TURN}system\nbe brief{tiny.EOS}\n{tiny.TURN}user\nhello{tiny.EOS}\n{tiny.TURN}assistant\n"
    assert model.decode(ids, skip_special=False) == text == model.chat_text("hello", system="be brief")
    assert model.chat("hello", system="be brief", max_tokens=5) == hs.generate(model, ids, max_tokens=5)
    history = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert model.chat("c", history=history, max_tokens=5) == model.chat([*history, {"role": "user", "content": "c"}], max_tokens=5)


def test_a_conversation_computes_each_word_once(model) -> None:
    with model.session() as plain:
        chat = model.conversation(system="be brief")
        for text in ("hello", "and then?"):
            answer = chat.send(text, max_tokens=6)
            assert answer == model.chat([*chat.messages[:-1]], max_tokens=6)
        assert [message["role"] for message in chat.messages] == ["system", "user", "assistant", "user", "assistant"]
        assert chat.last.result.prefill_tokens < chat.last.prompt_tokens
        chat.messages[1]["content"] = "hullo"  # an edit of the past
        assert chat.send("x", max_tokens=6) == model.chat(chat.messages[:-1], max_tokens=6)
        stream = chat.stream("y", max_tokens=100)
        piece = next(stream)
        stream.close()
        assert chat.messages[-1] == {"role": "assistant", "content": piece}
        chat.reset()
        assert chat.messages == [{"role": "system", "content": "be brief"}]
        with pytest.raises(hs.StateError):
            _ = chat.session
        plain.append([5])


@pytest.mark.parametrize("started", [False, True])
@pytest.mark.parametrize("end", ["drop", "close", "throw", "raise"])
def test_an_answer_that_is_not_read_to_its_end(model, started, end) -> None:
    """A generator that was never started runs no code of its own at its end."""
    chat = model.conversation()
    answer = chat.stream("y", max_tokens=100)
    said = [{"role": "user", "content": "y"}, {"role": "assistant", "content": next(answer)}] if started else []
    with pytest.raises(hs.BusyError, match="unfinished"):
        chat.send("z")
    if end == "close":
        answer.close()
        assert list(answer) == []
    elif end == "throw":
        with pytest.raises(KeyError, match="mine"):
            answer.throw(KeyError("mine"))
    elif end == "raise":
        with pytest.raises(KeyError):
            for _ in answer:
                raise KeyError
        assert answer.close() is None
    del answer
    if end == "raise":  # a piece was read before
        assert [message["role"] for message in chat.messages] == ["user", "assistant"]
        said = chat.messages
    assert chat.messages == said and model.stats().n_queued == 0
    assert chat.send("z", max_tokens=4) == model.chat([*said, {"role": "user", "content": "z"}], max_tokens=4)


def test_an_answer_of_a_conversation_that_was_reset_is_forgotten(model) -> None:
    chat = model.conversation()
    answer = chat.stream("y", max_tokens=100)
    next(answer)
    chat.reset()
    answer.close()
    assert chat.messages == []
    with pytest.raises(hs.StateError, match="nothing was said"):
        _ = chat.session


def test_what_a_conversation_cannot_have_is_told_at_once(model) -> None:
    before = model.stats().n_sessions
    for error, options in ((TypeError, {"system": 5}), (TypeError, {"nonsense": 1}), (hs.InvalidError, {"context": 0}),
                           (hs.InvalidError, {"kv": "f16"})):
        with pytest.raises(error):
            model.conversation(**options)
    assert model.stats().n_sessions == before


def test_no_template_and_no_tokenizer(tmp_path, cache) -> None:
    folder = tiny.write_hf(tmp_path / "plain")
    with hs.load(folder, dtype="f32", cache_dir=cache, threads=1, ram="8MiB") as model:
        with pytest.raises(hs.TemplateError, match="no chat template"):
            model.chat("x")
        with pytest.raises(hs.TemplateError):
            model.conversation()
        assert isinstance(hs.generate(model, "x", max_tokens=2), str)


# ---- endings ----------------------------------------------------------------------------------------------------


def test_use_after_close(random_path) -> None:
    model = hs.load(random_path, threads=2, ram="16MiB")
    session = model.session()
    session.append("x")
    stream = hs.generate(model, "x", stream=True)
    next(stream)
    model.close()
    model.close()
    assert model.closed and session.closed and "closed" in repr(model)
    for call in (lambda: hs.generate(model, [5]), lambda: model.logits([5]), model.session, model.stats, lambda: session.append([5]),
                 session.stats, lambda: next(stream), lambda: model.metadata("x")):  # fmt: skip
        with pytest.raises(hs.StateError, match="closed"):
            call()


def test_handles_are_not_copied(model) -> None:
    session = model.session()
    session.append("x")
    stream = session.generate(stream=True)
    for handle in (model, session, stream, model.agenerate("x"), model.conversation()):
        for operation in (pickle.dumps, copy.copy, copy.deepcopy):
            with pytest.raises(TypeError, match="cannot be copied or pickled"):
                operation(handle)
    stream.close()
    session.close()


@pytest.mark.parametrize("in_a_cycle", [False, True])
def test_dropping_a_model_frees_it(random_path, in_a_cycle) -> None:
    def threads() -> int:
        return len(os.listdir("/proc/self/task"))

    before = threads()
    for _ in range(3):
        model = hs.load(random_path, threads=2, ram="16MiB")
        session = model.session()
        session.append("x")
        stream = session.generate(stream=True)
        next(stream)
        del stream
        if in_a_cycle:  # then the collector ends both at once, in its own order
            box = [model, session]
            box.append(box)
            del box
        del model, session
        gc.collect()
        assert threads() == before


def test_memory_does_not_grow_with_calls(model) -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def work(n: int) -> None:
        for i in range(n):
            hs.generate(model, "The quick", max_tokens=4)
            with hs.generate(model, "x", max_tokens=50, stream=True) as stream:
                next(stream)
            if i % 5 == 0:
                with pytest.raises(hs.TokenError):
                    hs.generate(model, [9999])

    work(100)
    gc.collect()
    before = resident()
    work(300)
    gc.collect()
    assert (resident() - before) / 600 < 1024


def test_the_runtime_is_silent(random_path) -> None:
    done = run_python(
        """
        import sys, hisparse_rt as hs
        model = hs.load(sys.argv[1], threads=2, ram="16MiB")
        hs.generate(model, "x", max_tokens=3)
        try:
            hs.generate(model, [9999])
        except hs.TokenError:
            pass
        """,
        random_path,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


LONG_STEP = (
    "long = model.session(context=100_000, beyond_trained=True); long.append([5] * 30_000); "
    "d = threading.Thread(target=lambda: print(long.generate(max_tokens=9)), daemon=True); d.start(); time.sleep(0.3); sys.exit(6)"
)
"""The end comes while a daemon thread is inside a step."""


@pytest.mark.parametrize(
    ("end", "code"),
    [("", 0), ("sys.exit(3)", 3), ("os._exit(4)", 4), ("raise SystemExit(5)", 5), ("t.start(); time.sleep(0.05)", 0),
     ("p = model.agenerate('x')", 0), (LONG_STEP, 6)],
)
def test_the_interpreter_ends_cleanly(random_path, end, code) -> None:
    done = run_python(
        f"""
        import sys, os, time, threading, hisparse_rt as hs
        model = hs.load(sys.argv[1], threads=2, ram="64MiB")
        session = model.session()
        session.append("x")
        stream = session.generate(stream=True, max_tokens=4000)
        next(stream)
        t = threading.Thread(target=lambda: [None for _ in hs.generate(model, "x", stream=True, max_tokens=4000)], daemon=True)
        {end}
        """,
        random_path,
    )
    assert (done.returncode, done.stderr) == (code, "")


def test_a_forked_child_is_told(random_path) -> None:
    done = run_python(
        """
        import os, sys, hisparse_rt as hs
        model = hs.load(sys.argv[1], threads=2, ram="16MiB")
        hs.generate(model, "x", max_tokens=2)
        child = os.fork()
        if child == 0:
            try:
                hs.generate(model, "x", max_tokens=2)
            except hs.ForkedError:
                sys.exit(0)
            sys.exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert isinstance(hs.generate(model, "x", max_tokens=2), str)
        """,
        random_path,
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("n", [4000, 3])
def test_ctrl_c_arrives_within_a_step(random_path, n) -> None:
    process = subprocess.Popen(
        [
            sys.executable,
            "-c",
            textwrap.dedent("""
                import sys, time, hisparse_rt as hs
                model = hs.load(sys.argv[1], threads=1, ram="64MiB", chunk=64, isa="reference")
                def report(done, total):
                    print("computing", flush=True)
                print("ready", flush=True)
                try:
                    while True:
                        for piece in hs.generate(model, [5] * int(sys.argv[2]), max_tokens=90, stream=True, progress=report):
                            pass
                except KeyboardInterrupt:
                    assert model.stats().n_sessions == 0
                    print("interrupted", flush=True)
            """),
            random_path,
            str(n),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "ready\n"
    if n > 3:
        assert process.stdout.readline() == "computing\n"
    time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    try:
        output, errors = process.communicate(timeout=60)
    finally:
        process.kill()  # what was not interrupted would compute for ever
    assert output.endswith("interrupted\n") and errors == "" and process.returncode == 0


# ---- errors as Python kinds -------------------------------------------------------------------------------------


def test_errors_are_what_they_seem() -> None:
    from hisparse_rt.errors import from_status

    assert isinstance(from_status(-1, "x"), ValueError) and isinstance(from_status(-2, "x"), MemoryError)
    missing = from_status(-4, "m.hsr: no", 2)
    assert isinstance(missing, FileNotFoundError) and missing.errno == 2 and str(missing) == "m.hsr: no"
    assert isinstance(from_status(-4, "x", 13), OSError) and not isinstance(from_status(-4, "x", 13), FileNotFoundError)
    assert from_status(-999, "").status == -999 and "-999" in str(from_status(-999, ""))
    assert "NaN" in str(from_status(-11, ""))
    copied = pickle.loads(pickle.dumps(missing))
    assert type(copied) is type(missing) and copied.status == -4 and copied.sys_code == copied.errno == 2 and str(copied) == str(missing)


def test_every_name_of_the_header_is_declared() -> None:
    from hisparse_rt._library import lib

    header = (Path(__file__).parents[2] / "runtime" / "include" / "hisparse_rt" / "hisparse_rt.h").read_text()
    names = re.findall(r"^HSR_API .*?\b(hsr_\w+)\(", header, re.M) + re.findall(r"^#define +(HSR_\w+) +[-(\d]", header, re.M)
    assert len(names) > 60 and {name for name in names if not hasattr(lib, name)} == set()


def test_statuses_and_exceptions_match_the_library() -> None:
    from hisparse_rt import errors
    from hisparse_rt._library import lib

    for name in dir(lib):
        if name.startswith("HSR_E_"):
            assert errors.from_status(getattr(lib, name), "").status == getattr(lib, name)
            assert type(errors.from_status(getattr(lib, name), "")) is not errors.HisparseError, name
