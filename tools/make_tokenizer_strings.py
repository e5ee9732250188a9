# SPDX-License-Identifier: Apache-2.0
"""Write awkward strings and their token ids for the demo model: tests/data/pretokenizer/strings.json.

    python tools/make_tokenizer_strings.py SmolLM2-135M-Instruct.Q4_1.gguf [OUT.json]

Run once by hand. It needs the package regex, which is not a dependency of this project. The tokenizer is written out here
step by step from the GGUF's vocabulary and merges, and shares nothing with the tokenizers library, which is what is tested.
"""

import json
import random
import sys
from pathlib import Path

import regex
from gguf import GGUFReader

COUNT = 300
CONTROL = 3  # token type
DIGIT = regex.compile(r"(\p{N})")
WORDS = regex.compile(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\p{White_Space}\p{L}\p{N}]+"
                      r"|\p{White_Space}+(?!\P{White_Space})|\p{White_Space}+")

WRITTEN = [
    # digits, and whitespace before them
    "0", "42", "1234567890", "100,000 tokens", "3.14159", "1e-05", "x1", "1x", "x 1", "x  1", "x   12", "a\t42",
    "a\t\t42", "\n1", "\n\n1. item", "1 2  3   4", "12:34:56", "2024-02-29T23:59:59Z", "+49 (0)30 1234-5678",
    "0x1F 0b101", "v1.2.3-rc4", "$1,299.00", "50%", "1/2", "No.7", "   7", " 7 ", "7   ", "٣٤٥", "१२३ र\u0941पय\u0947",
    "Ⅻ", "½ cup", "x²+y³", "①②③", "第3章", "１２３", "𝟙𝟚", "5'11\"", "the 1990's", "9's", "\u00a01",
    # line ends and other whitespace
    "", " ", "  ", "    ", "\t", "\n", "\r", "\r\n", "\r\n\r\n", "a\r\nb", "a\r\n\r\nb", "a \r\n b", "line\n", "\nline",
    "a\n\n\nb", " a", "a ", "  a  ", "a  b", "a   b", "a\tb", "a \tb", "a\t b", "\t\tx", "\ta\t", "    return x",
    "a" + " " * 40 + "b", " " * 100, "\n" * 20, "\t" * 9 + "end", "a\u00a0b", "a\u2003b", "a\u3000b", "a\u2028b",
    "a\u0085b", "a\u200bb", "a\u000bb\u000cc", "\ufeffbom", "a\u001fb", "a\u0000b", "a\u007fb", "a\u0004b", "!\u0004!",
    # apostrophes
    "I'm", "I'M", "don't", "DON'T", "we've they're he'll she'd it's", "'s", "''s", "' s", "x's's", "o'clock",
    "rock 'n' roll", "l'été d'hier", "I’m",
    # Latin with accents, composed and not
    "naïve café", "cafe\u0301", "e\u0301e\u0301", "n\u0303", "A\u030a", "\u0301", "\u0301a", "a\u0301\u0301\u0301b",
    "Ζωή", "Zoë", "ﬁn", "İstanbul", "ß ẞ", "Œuvre", "Việt Nam", "Vie\u0323\u0302t", "ñandú", "Ångström",
    "À l'œuvre on connaît l'artisan.", "ŁÓDŹ",
    # other scripts
    "日本語", "日本語 の テスト", "东京2020年", "中文，标点。", "「引用」", "한국어 문장입니다.", "한국어", "Привет, мир!", "שלום עולם", "مرحبا بالعالم",
    "नमस\u094dत\u0947 द\u0941निया", "ไทย ภาษา", "ქართული", "Ελληνικά", "አማርኛ", "𠮷野家", "𝒜𝓁𝑔", "ｶﾞ", "বাংলা",
    "தமிழ\u0bcd",
    # emoji
    "🙂", "🙂🙂🙂", " 🙂", "a🙂b", "👍🏽", "👩\u200d💻", "👨\u200d👩\u200d👧\u200d👦", "🏳\ufe0f\u200d🌈", "🇫🇷🇩🇪",
    "1\ufe0f\u20e32\ufe0f\u20e3", "❤\ufe0f", "☕\ufe0f time", "👩\u200d💻1", "🙂 1", "🫠", "#\ufe0f\u20e3", "❤\ufe0f\ufe0f",
    "\u200d",
    # punctuation and symbols
    "...", "....", "…", "!?", "?!?!", "-- --", "—", "a—b", "a - b", "(a)[b]{c}", "<a>", "</a>", "a&b", "a & b",
    "@user #tag", "C:\\dir\\file", "~/.config", "https://example.org/a?b=1&c=%20#d", "me@example.org", "**bold** _it_",
    "| a | b |", "€5 £6 ¥7", "±≤≠∞", "→←", "¿Qué?", "¡Hola!", "a_b_c", "__init__", "^_^", "`code`", "\"quoted\"",
    "“curly”", "50°C", "™®©", "a\\nb", "$x^2$", "\ufffd", "\ue000", "\U0010ffff", "\U00040000",
    # code
    "def f(x):\n    return x ** 2\n", "foo(bar)[0] += 3.14159;", "for (int i = 0; i < 10; ++i) {\n\tsum += a[i];\n}",
    "if x==1:\n\tpass", "#include <stdio.h>\n\nint main(void) { return 0; }", "SELECT * FROM t WHERE id=42;",
    "{\"key\": [1, 2.5, null]}", "a = b if c else d  # why", "<div class=\"x1\">\r\n  <p>Hi</p>\r\n</div>",
    "x -> y => z", "!=", "a&&b||c", "::<>()", "let s = r#\"raw\"#;", "    \n    \n", "}\n}\n\n}", "//    comment",
    "git commit -m 'fix: 12'", "\\begin{eq}\n x_1\n\\end{eq}", "printf(\"%5.2f\\n\", x);", "camelCaseName2",
    "HTTPServer404", "snake_case_3",
    # control tokens, and text that only looks like them
    "<|im_start|>user\nhi<|im_end|>\n", "<|im_start|>", "<|im_end|>", "<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>1", "<|im_start|> 1", "<|im_start|>  1", "<|im_end|> text", "<|im_end|>  text", "<|im_end|>\r\n",
    "a<|im_end|>b", "a <|im_end|> b", "<|im_start|><|im_start|>", "<|im_start", "im_start|>", "<|im_start|",
    "<|IM_START|>", "< |im_start|>", "<|im_start|>'s", "<|endoftext|>The", "<|endoftext|> The", "<|endoftext|>\n\nThe",
    "<repo_name>a/b<file_sep>c.py\n", "<reponame>x", "<filename>a.py\n<gh_stars>100-1000\n",
    "<jupyter_start><jupyter_text># T<jupyter_code>1+1<jupyter_output>2<empty_output>",
    "<issue_start>username_0: x<issue_comment>y<issue_closed>", "<jupyter_script>", "<|im_start|>日本", "<|im_end|>🙂",
    "<|im_end|>\u0301", "é<|im_end|>",
]
PIECES = [
    " ", "  ", "   ", "\t", "\n", "\r\n", "\u00a0", "1", "23", "4567", "a", "the", "The", "Hello", "WORLD", "naïve",
    "e\u0301", "日本", "語", "Привет", "🙂", "👩\u200d💻", "👍🏽", "\u200d", ".", ",", "...", "!", "(", ")", "[0]", "{", "}",
    ";", "=", "==", "->", "'s", "'ll", "'", "\"", "_", "-", "/", "\\", "#", "<", "|>", "<|im_start|>", "<|im_end|>",
    "<|endoftext|>", "٣", "½", "²", "ß", "ﬁ",
]


def byte_letters():
    """The printable character that stands for each byte: itself if printable in Latin-1, else the next one from U+0100 on."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    letters = {byte: chr(byte) for byte in plain}
    for byte in range(256):
        letters.setdefault(byte, chr(256 + len(letters) - len(plain)))
    return letters


class Tokenizer:
    def __init__(self, meta):
        tokens = meta["tokenizer.ggml.tokens"]
        self.ids = {token: i for i, token in enumerate(tokens)}
        self.ranks = {tuple(merge.split(" ")): rank for rank, merge in enumerate(meta["tokenizer.ggml.merges"])}
        self.letters = byte_letters()
        control = [token for token, kind in zip(tokens, meta["tokenizer.ggml.token_type"]) if kind == CONTROL]
        self.control = regex.compile("(" + "|".join(regex.escape(token) for token in sorted(control, key=len, reverse=True)) + ")")

    def encode(self, text):
        ids = []
        for i, part in enumerate(self.control.split(text)):
            ids += [self.ids[part]] if i % 2 else self.encode_text(part)
        return ids

    def encode_text(self, text):
        ids = []
        for part in DIGIT.split(text):  # every digit on its own, before the words are looked for
            words = WORDS.findall(part)
            assert "".join(words) == part
            for word in words:
                # A byte without a token of its own leaves nothing behind.
                ids += [self.ids[token] for token in self.merge(word) if token in self.ids]
        return ids

    def merge(self, word):
        symbols = [self.letters[byte] for byte in word.encode()]
        # Such a byte takes no part in merges either.
        symbols = [symbol for symbol in symbols if symbol in self.ids]
        while len(symbols) > 1:
            ranks = [self.ranks.get(pair, len(self.ranks)) for pair in zip(symbols, symbols[1:])]
            best = min(ranks)
            if best == len(self.ranks):
                break
            at = ranks.index(best)
            symbols[at:at + 2] = [symbols[at] + symbols[at + 1]]
        return symbols


def strings():
    drawn, chosen = random.Random(1), list(dict.fromkeys(WRITTEN))
    while len(chosen) < COUNT:
        text = "".join(drawn.choices(PIECES, k=drawn.randint(3, 14)))
        if text not in chosen:
            chosen.append(text)
    return chosen


def main():
    if len(sys.argv) not in (2, 3):
        raise SystemExit(__doc__)
    meta = {key: field.contents() for key, field in GGUFReader(sys.argv[1]).fields.items() if key.startswith("tokenizer.")}
    if (meta["tokenizer.ggml.model"], meta["tokenizer.ggml.pre"]) != ("gpt2", "smollm"):
        raise SystemExit("make_tokenizer_strings: not the tokenizer this script knows")
    tokenizer = Tokenizer(meta)
    out = Path(sys.argv[2]) if len(sys.argv) == 3 else Path(__file__).parent.parent / "tests/data/pretokenizer/strings.json"
    lines = [json.dumps([text, tokenizer.encode(text)], separators=(",", ":")) for text in strings()]
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text("[\n" + ",\n".join(lines) + "\n]\n", encoding="utf-8")
    print(f"{out}: {len(lines)} strings, {out.stat().st_size} bytes")


if __name__ == "__main__":
    main()
