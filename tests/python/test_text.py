# SPDX-License-Identifier: Apache-2.0
"""Incremental text: pieces joined are the whole text, stop strings never leak, nothing held back is lost."""

from __future__ import annotations

import functools

import pytest
import tiny
from hisparse_rt.text import Detokenizer, StopScanner
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models

pytestmark = pytest.mark.python

FAMILY = "👨‍👩‍👧"  # five code points, 18 bytes


# ---- tokenizers of the kinds in use -----------------------------------------------------------------------------


@functools.cache
def byte_level() -> Tokenizer:
    return Tokenizer.from_str(tiny.tokenizer_json())


@functools.cache
def byte_fallback() -> Tokenizer:
    """As SentencePiece models are written: pieces with a mark for the space, and a token for each byte."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁a", "▁the", "b", "c", ".", "é", "▁▁", "中", "▁."]
    tokenizer = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([
        decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(content=" ", left=1)
    ])  # fmt: skip
    tokenizer.add_special_tokens([AddedToken(piece, normalized=False) for piece in ("<unk>", "<s>", "</s>")])
    return tokenizer


@functools.cache
def metaspace() -> Tokenizer:
    pieces = ["<unk>", "▁", "▁a", "▁b", "c", "d▁e", ".", "▁."]
    tokenizer = Tokenizer(models.Unigram([(piece, 0.0) for piece in pieces], unk_id=0))
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


@functools.cache
def word_pieces() -> Tokenizer:
    pieces = ["[UNK]", "do", "##ing", "n't", ".", "we", "##s", "'", "x"]
    tokenizer = Tokenizer(models.WordPiece({piece: i for i, piece in enumerate(pieces)}, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


TOKENIZERS = {"byte_level": byte_level, "byte_fallback": byte_fallback, "metaspace": metaspace, "word_pieces": word_pieces}


def detokenizer(tokenizer: Tokenizer) -> Detokenizer:
    special = {token for token, entry in tokenizer.get_added_tokens_decoder().items() if entry.special}
    in_bytes = {tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in range(256)} - {None}
    return Detokenizer(tokenizer.decode, special, in_bytes)


def pieces_of(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    decoder = detokenizer(tokenizer)
    return [*(decoder.push(token) for token in ids), decoder.finish()]


def byte_ids(tokenizer: Tokenizer, data: bytes) -> list[int]:
    """One id per byte."""
    if tokenizer is byte_fallback():
        return [tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in data]
    spelled = {byte: text for text in tokenizer.get_vocab() if len(text) == 1 for byte in [_byte_of(text)]}
    return [tokenizer.token_to_id(spelled[byte]) for byte in data]


def _byte_of(character: str) -> int:
    """The byte a character of the byte-level alphabet stands for."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table = {chr(byte): byte for byte in kept}
    table |= {chr(256 + i): byte for i, byte in enumerate(sorted(set(range(256)) - set(kept)))}
    return table[character]


# ---- detokenizer ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TOKENIZERS)
@given(data=st.data())
def test_pieces_join_to_the_decoded_text(name: str, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[name]()
    ids = data.draw(st.lists(st.integers(0, tokenizer.get_vocab_size() - 1), max_size=40))
    pieces = pieces_of(tokenizer, ids)
    assert "".join(pieces) == tokenizer.decode(ids)
    for piece in pieces:
        piece.encode("utf-8")  # no half character


@pytest.mark.parametrize("tokenizer", [byte_level(), byte_fallback()], ids=["byte_level", "byte_fallback"])
@given(text=st.text(max_size=12), cut=st.integers(0, 3))
@example(text="🙂", cut=0)
@example(text=FAMILY, cut=0)
@example(text="中", cut=1)
def test_characters_in_single_bytes(tokenizer: Tokenizer, text: str, cut: int) -> None:
    data = text.encode()
    ids = byte_ids(tokenizer, data[: len(data) - cut] if cut < len(data) else data)
    pieces = pieces_of(tokenizer, ids)
    assert "".join(pieces) == tokenizer.decode(ids)
    if not cut:
        assert "".join(pieces).strip() == text.strip() and "\ufffd" not in "".join(pieces).replace(text, "")


def test_an_emoji_comes_whole_with_its_last_byte() -> None:
    assert pieces_of(byte_level(), byte_ids(byte_level(), "🙂".encode())) == ["", "", "", "🙂", ""]


def test_bad_bytes_become_marks_when_they_cannot_be_anything_else() -> None:
    ids = byte_ids(byte_level(), b"\xffa\xf0\x9f")
    assert pieces_of(byte_level(), ids) == ["", "\ufffda", "", "", "\ufffd"]


def test_spaces_survive() -> None:
    encode = byte_fallback().token_to_id
    ids = [encode("▁the"), encode("▁a"), encode("▁▁"), encode("▁."), encode("b")]
    assert pieces_of(byte_fallback(), ids) == ["the", " a", "  ", " .", "b", ""]
    assert "".join(pieces_of(byte_fallback(), [encode("▁"), encode("▁"), encode(".")])) == " ."


def test_a_token_without_text_does_not_move_the_start_of_the_text() -> None:
    ids = [byte_fallback().token_to_id("▁the"), 99999, byte_fallback().token_to_id("▁a")]
    assert "".join(pieces_of(byte_fallback(), ids)) == byte_fallback().decode(ids) == "the a"


def test_special_tokens_are_silent_and_cost_nothing() -> None:
    decoder = detokenizer(byte_level())
    assert [decoder.push(token) for token in (0, 1, 2)] == ["", "", ""]
    assert decoder.push(byte_ids(byte_level(), b"x")[0]) == "x"


def test_a_long_text_is_decoded_in_short_parts() -> None:
    longest = 0

    def decode(ids: list[int]) -> str:
        nonlocal longest
        longest = max(longest, len(ids))
        return byte_level().decode(ids)

    decoder = Detokenizer(decode)
    text = "".join(decoder.push(token) for token in byte_ids(byte_level(), b"all work and no play " * 50))
    assert text == "all work and no play " * 50
    assert longest <= 2


# ---- stop strings -----------------------------------------------------------------------------------------------


def scan(pieces: list[str], stops: list[str]) -> tuple[list[str], str | None]:
    scanner = StopScanner(stops)
    return [*(scanner.push(piece) for piece in pieces), scanner.finish()], scanner.matched


def cut(text: str, stops: list[str]) -> str:
    """What should be left: everything before the earliest stop string."""
    return text[: min((text.index(stop) for stop in stops if stop in text), default=len(text))]


@given(pieces=st.lists(st.text("abc", max_size=4), max_size=12), stops=st.lists(st.text("abc", min_size=1, max_size=5), max_size=3))
@example(pieces=["ab", "cd"], stops=["abcx", "bc"])
def test_text_ends_exactly_before_the_earliest_stop(pieces: list[str], stops: list[str]) -> None:
    text = "".join(pieces)
    shown, matched = scan(pieces, stops)
    assert "".join(shown) == cut(text, stops)
    assert (matched is not None) == any(stop in text for stop in stops)


@given(text=st.text("abc", max_size=20), stops=st.lists(st.text("abc", min_size=1, max_size=5), max_size=3))
def test_one_piece_or_many_makes_no_difference(text: str, stops: list[str]) -> None:
    assert "".join(scan([text], stops)[0]) == "".join(scan(list(text), stops)[0])


@pytest.mark.parametrize(
    ("stops", "left"),
    [(["ta ga"], "alpha be"), (["beta"], "alpha "), (["a"], ""), (["ha be", "a b"], "alp"), (["gamma!"], "alpha beta gamma")],
)
@pytest.mark.parametrize("size", [1, 2, 3, 5, 16])
def test_stops_across_borders(stops: list[str], left: str, size: int) -> None:
    text = "alpha beta gamma"
    assert "".join(scan([text[i : i + size] for i in range(0, len(text), size)], stops)[0]) == left


def test_text_is_held_only_while_it_may_be_a_stop() -> None:
    assert scan(["x<", "st", "ay", "<sto", "p>y"], ["<stop>"]) == (["x", "", "<stay", "", "", ""], "<stop>")


def test_the_rest_of_the_piece_after_a_stop_is_dropped() -> None:
    assert scan(["ab|cd", "ef"], ["|"]) == (["ab", "", ""], "|")


def test_a_stop_of_many_bytes_cut_by_tokens() -> None:
    decoder, scanner = detokenizer(byte_level()), StopScanner(["中文"])
    ids = byte_ids(byte_level(), "a中文b".encode())
    assert "".join(scanner.push(decoder.push(token)) for token in ids) == "a"
    assert scanner.matched == "中文"


def test_an_empty_stop_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopScanner([""])
