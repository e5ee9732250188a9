# SPDX-License-Identifier: Apache-2.0
"""A prompt that is kept in a file: what begins alike is not computed again, the answer is the same, and no file of others is lost."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import hisparse_rt as hs
import numpy as np
import pytest
import shell
import tiny
from hisparse_rt.tools.convert import convert

DOCUMENT = [int(i) for i in np.random.default_rng(3).integers(3, 300, 900)]
FIRST, SECOND = [*DOCUMENT, 7, 8, 9], [*DOCUMENT, 11, 12]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("cache")
    for name, seed in (("tiny", 5), ("other", 6)):
        cfg = tiny.config(max_position_embeddings=4096, eos_token_id=tiny.NULL)
        tiny.write_hf(folder / name, cfg, tiny.weights(cfg, seed))
        convert(folder / name, folder / f"{name}.hsr", dtype="f32")
    return folder


@pytest.fixture
def model(folder):
    with hs.load(folder / "tiny.hsr", threads=1) as model:
        yield model


def ask(model: hs.Model, prompt: list[int], cache: Path | None, **options):
    return hs.generate(model, prompt, max_tokens=12, prompt_cache=cache, return_details=True, **options)


def test_only_what_differs_is_computed(model, tmp_path) -> None:
    cache = tmp_path / "book"
    first, computed = ask(model, FIRST, cache), model.stats().prefill_tokens
    assert first.tokens == ask(model, FIRST, None).tokens and computed >= len(FIRST)
    before = model.stats().prefill_tokens
    second = ask(model, SECOND, cache)
    assert model.stats().prefill_tokens - before < 10
    assert second.tokens == ask(model, SECOND, None).tokens and second.tokens != first.tokens

    written = cache.stat()
    before = model.stats().prefill_tokens
    assert ask(model, SECOND, cache).tokens == second.tokens
    assert ask(model, DOCUMENT, cache).tokens == ask(model, DOCUMENT, None).tokens
    assert model.stats().prefill_tokens - before < 10 + len(DOCUMENT)
    assert (cache.stat().st_ino, cache.stat().st_mtime_ns) == (written.st_ino, written.st_mtime_ns)  # nothing new, nothing written


def test_a_longer_prompt_that_is_kept_serves_a_shorter_one(model, tmp_path) -> None:
    """Though prompt and answer would need a smaller context than what is kept."""
    cache = tmp_path / "c"
    ask(model, [*DOCUMENT, *range(3, 100)], cache)
    before = model.stats().prefill_tokens
    got = ask(model, SECOND, cache)
    assert model.stats().prefill_tokens - before < 10
    assert got.tokens == ask(model, SECOND, None).tokens
    ask(model, [*DOCUMENT, *range(3, 100)], cache)
    exact = ask(model, SECOND, cache, context=len(SECOND) + 5)
    assert len(exact.tokens) == 5 and exact.finish_reason == "length"


def test_a_pipe_is_not_waited_for(model, tmp_path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(hs.InvalidError, match="pipe is not a regular file"):
        ask(model, FIRST, tmp_path / "pipe")


def test_progress_and_a_stream(model, tmp_path) -> None:
    told: list[tuple[int, int]] = []
    stream = hs.generate(model, FIRST, max_tokens=3, ignore_eos=True, stream=True, prompt_cache=tmp_path / "c",
                         progress=lambda done, total: told.append((done, total)))
    assert "".join(stream) == stream.result.text and len(stream.result.tokens) == 3
    assert told[-1] == (len(FIRST), len(FIRST))


def test_encoded_pages_that_cannot_be_cut(model, tmp_path) -> None:
    """The shared part ends further back than rollback_tokens: all is computed again, and the answer is right."""
    cache = tmp_path / "c"
    ask(model, [*DOCUMENT, *range(3, 290), *range(3, 290)], cache, kv="int8")
    assert ask(model, SECOND, cache, kv="int8").tokens == ask(model, SECOND, None, kv="int8").tokens


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-3000] ^= 1
    data[4097] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("spoil", [damage, lambda path: path.write_bytes(path.read_bytes()[:9000]), lambda path: path.write_bytes(b"")])
def test_a_damaged_cache_is_replaced(model, tmp_path, spoil, caplog) -> None:
    cache = tmp_path / "c"
    want = ask(model, FIRST, cache).tokens
    whole = cache.stat().st_size
    spoil(cache)
    empty = cache.stat().st_size == 0
    with caplog.at_level(logging.WARNING, "hisparse_rt"):
        assert ask(model, FIRST, cache).tokens == want
    assert cache.stat().st_size == whole
    assert empty or ("computed again" in caplog.text and str(cache) in caplog.text)


def test_caches_of_other_models_and_formats_are_replaced(model, folder, tmp_path, caplog) -> None:
    cache = tmp_path / "c"
    with hs.load(folder / "other.hsr", threads=1) as other:
        ask(other, FIRST, cache)
    for kv in ("auto", "int8", "auto", "int8", "f32"):
        caplog.clear()
        with caplog.at_level(logging.WARNING, "hisparse_rt"):
            assert ask(model, FIRST, cache, kv=kv).tokens == ask(model, FIRST, None, kv=kv).tokens
        assert "computed again" in caplog.text


SPARSE = {"selector": "minmax", "budget": 64, "window_size": 64, "dense_below": 0, "prefill_dense_below": 0, "prefill_budget": 64}


def test_a_cache_of_another_profile_is_replaced(folder, tmp_path, caplog) -> None:
    """What a profile did not attend is missing in every key and value behind. Window and sink decide which pages are read encoded. Each
    profile differs from the one before in one thing, but for the last."""
    budget = {**SPARSE, "budget": 128}
    window = {**budget, "window_size": 128}
    cache = tmp_path / "c"
    for profile in (SPARSE, budget, window, {**window, "sink_size": 0}, "exact"):
        with hs.load(folder / "tiny.hsr", threads=1, profile=profile) as model:
            fresh = ask(model, FIRST, None).tokens
            for hit in (False, True):
                caplog.clear()
                before = model.stats().prefill_tokens
                with caplog.at_level(logging.WARNING, "hisparse_rt"):
                    assert ask(model, FIRST, cache).tokens == fresh
                assert (model.stats().prefill_tokens - before < 10) == hit, profile
                assert profile is SPARSE or ("computed again" not in caplog.text) == hit


def serves(model: hs.Model, cache: Path) -> bool:
    """Not computing a prompt whose beginning the cache holds; with the same answer in any case."""
    before = model.stats().prefill_tokens
    got = ask(model, FIRST, cache).tokens
    computed = model.stats().prefill_tokens - before
    assert got == ask(model, FIRST, None).tokens
    return computed < 10


def test_tokens_of_two_profiles_are_no_profiles(folder, tmp_path) -> None:
    """An explicit restore may go on under another profile; what comes of it serves no cache."""
    one, other = SPARSE, {**SPARSE, "budget": 128}
    cache = tmp_path / "c"

    def go_on(session, ids) -> None:
        with session:
            session.append(ids)
            session.prefill()
            session.save(cache)

    with hs.load(folder / "tiny.hsr", threads=1, profile=one) as model:
        with model.session() as session:
            session.append(DOCUMENT[:300])
            session.prefill()
            go_on(session.fork(), DOCUMENT[300:])
        assert serves(model, cache)
        go_on(model.session(), DOCUMENT[:300])
        go_on(model.restore(cache), DOCUMENT[300:])
        assert serves(model, cache)
        go_on(model.session(), DOCUMENT[:300])
        go_on(model.restore(cache, profile=other), DOCUMENT[300:])
        assert not serves(model, cache)
    with hs.load(folder / "tiny.hsr", threads=1, profile=other) as model:
        go_on(model.session(profile=one), DOCUMENT[:300])
        go_on(model.restore(cache), DOCUMENT[300:])
        assert not serves(model, cache)


def test_a_cache_with_another_index_is_replaced(model, tmp_path) -> None:
    """Its tokens are right, but sessions that go on from it would be larger than those that do not."""
    for index, right in (("minmax", False), ("none", True)):
        with model.session(index=index) as session:
            session.append(DOCUMENT)
            session.prefill()
            session.save(tmp_path / "c")
        assert serves(model, tmp_path / "c") == right


def test_files_of_others_are_left_alone(model, folder, tmp_path) -> None:
    document = tmp_path / "notes.txt"
    document.write_text("my only copy")
    with pytest.raises(hs.InvalidError, match=r"notes\.txt is not a saved session"):
        ask(model, FIRST, document)
    assert document.read_text() == "my only copy"
    with pytest.raises(hs.FileError, match="nowhere"):
        ask(model, FIRST, tmp_path / "nowhere" / "c")
    with pytest.raises(hs.InvalidError, match="one prompt"):
        hs.generate(model, [FIRST, SECOND], prompt_cache=tmp_path / "c")


def test_a_full_disk_costs_the_cache_only(folder, tmp_path) -> None:
    script = (f"import resource, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
              f"resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))\n"
              f"import hisparse_rt as hs\n"
              f"with hs.load({str(folder / 'tiny.hsr')!r}, threads=1) as m:\n"
              f"    print(hs.generate(m, {FIRST}, max_tokens=12, prompt_cache={str(tmp_path / 'c')!r}, return_details=True).tokens)")
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "the prompt is not kept" in done.stderr, done.stderr
    with hs.load(folder / "tiny.hsr", threads=1) as model:
        assert str(ask(model, FIRST, None).tokens) == done.stdout.strip()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.python
def test_on_the_command_line(folder, tmp_path) -> None:
    cache, text = tmp_path / "c", "the quick brown fox " * 20
    found = []
    for question in ("jumps?", "sleeps?", "sleeps?"):
        done = shell.run("generate", folder / "tiny.hsr", "--raw", "-p", text + question, "--max-tokens", 4,
                         "--json", "--prompt-cache", cache)
        assert done.returncode == 0, done.stderr
        found.append(json.loads(done.stdout))
    assert cache.exists() and found[1]["tokens"] == found[2]["tokens"]
    without = shell.run("generate", folder / "tiny.hsr", "--raw", "-p", text + "sleeps?", "--max-tokens", 4, "--json")
    assert json.loads(without.stdout)["tokens"] == found[1]["tokens"]
