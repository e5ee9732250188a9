# SPDX-License-Identifier: Apache-2.0
"""The convert command."""

import argparse
import json
import os

import pytest
import tiny

from hisparse_rt.tools import convert_cli
from hisparse_rt.tools.errors import ConvertError

pytestmark = pytest.mark.python


def run(*arguments):
    parser = argparse.ArgumentParser()
    convert_cli.add_arguments(parser)
    return convert_cli.run(parser.parse_args([os.fspath(argument) for argument in arguments]))


def test_report_for_people(tmp_path, capsys):
    src = tiny.write_hf(tmp_path / "hf")
    assert run(src, tmp_path / "m.hsr") == 0
    out, err = capsys.readouterr()
    assert "m.hsr: llama q8" in out and err == ""


def test_report_as_json_with_warnings_apart(tmp_path, capsys):
    src = tiny.write_hf(tmp_path / "hf", tokenizer=None)
    assert run(src, tmp_path / "m.hsr", "--dtype", "bf16", "--json") == 0
    out, err = capsys.readouterr()
    report = json.loads(out)
    assert report["dtype"] == "bf16" and report["bytes"] == (tmp_path / "m.hsr").stat().st_size
    assert err.startswith("warning: ") and report["warnings"]


def test_a_failure_is_left_to_the_caller(tmp_path, capsys):
    src = tiny.write_hf(tmp_path / "hf")
    (src / "model.safetensors").unlink()
    with pytest.raises(ConvertError, match="safetensors"):
        run(src, tmp_path / "m.hsr")
    assert capsys.readouterr() == ("", "")


def test_options_reach_the_converter(tmp_path, capsys):
    src = tiny.write_gguf(tmp_path / "m.gguf", keys={"tokenizer.ggml.pre": "mystery"})
    with pytest.raises(ConvertError, match="mystery"):
        run(src, tmp_path / "m.hsr")
    assert run(src, tmp_path / "m.hsr", "--allow-unknown-pretokenizer", "--dtype", "q4") == 0
    with pytest.raises(SystemExit):
        run(src, tmp_path / "m.hsr", "--dtype", "q5")


def test_bar_only_when_asked(tmp_path, capsys):
    src = tiny.write_hf(tmp_path / "hf")
    assert run(src, tmp_path / "m.hsr", "--progress") == 0
    assert "convert" in capsys.readouterr().err
