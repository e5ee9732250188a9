# SPDX-License-Identifier: Apache-2.0
"""eval: how close sparse attention comes to dense attention."""
from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from .. import picture, progress
from ..checks import text_content
from ..model import Model
from ..profile import PRESETS, SELECTORS, Profile, as_profile
from ..profile_index import format_of
from ..session import KV_FORMATS
from . import common

if TYPE_CHECKING:
    from ..eval.recall import Truth

HELP = "measure how close sparse attention comes to dense attention"
_USUAL = 8192
_USUAL_HELP = f"(default: {_USUAL}, or what fits the length the model was trained for)"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(metavar="WHAT", required=True)
    for name, add, run_it, text in (
        ("ppl", _add_ppl, _ppl, "distance of the predictions on a text"),
        ("needle", _add_needle, _needle, "facts hidden in a long text"),
        ("recall", _add_recall, _recall, "attention found per layer and head, beside an oracle"),
        ("curve", _add_curve, _curve, "quality and speed over budgets and selectors"),
    ):
        command = commands.add_parser(name, help=text, description=text)
        common.add_model(command)
        command.add_argument("--beyond-trained", action="store_true", help="allow lengths above what the model was trained for")
        command.add_argument("--json", action="store_true", help="print JSON")
        add(command)
        common.add_engine(command)
        command.set_defaults(evaluate=run_it)


def run(args: argparse.Namespace) -> int:
    code: int = args.evaluate(args)
    return code


# ---- options ----------------------------------------------------------------------------------------------------


def _depths(text: str) -> list[float]:
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"{text!r} is not a list of depths, such as 0.1,0.5,0.9") from None
    if not all(0 <= value <= 1 for value in values):
        raise ValueError("a depth is from 0, the beginning, to 1, the end")
    return values


def _names(known: tuple[str, ...]) -> Callable[[str], list[str]]:
    def parse(text: str) -> list[str]:
        values = [part.strip() for part in text.split(",")]
        for value in values:
            if value not in known:
                raise ValueError(f"{value!r} is not one of {', '.join(known)}")
        return values

    return parse


def _add_text(parser: argparse.ArgumentParser, tokens: int) -> None:
    parser.add_argument("--text", metavar="FILE", action="append", default=[],
                        help="text to predict; may be given several times (default: Python's own standard library)")
    parser.add_argument("--context", type=common.counts(1), metavar="N,N",
                        help=f"tokens of the dense prompt, before the text is predicted {_USUAL_HELP}")
    parser.add_argument("--tokens", type=common.whole(1), default=tokens, metavar="M", help="tokens to predict (default: %(default)s)")


def _add_compare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--compare", metavar="NAME|FILE", action="append", default=[],
                        help="another profile to measure on the same tokens; may be given several times")


def _add_ppl(parser: argparse.ArgumentParser) -> None:
    from ..eval.ppl import PARTS

    _add_text(parser, 256)
    parser.add_argument("--parts", type=common.checked(_names(PARTS)), default=["decode"], metavar="PART,PART",
                        help="what a profile computes: decode, after a dense prompt; prefill, which dense decoding follows; or both "
                             "(default: decode)")
    parser.add_argument("--against-kv", choices=KV_FORMATS, default="auto",
                        help="key-value format of the dense run that --kv and profiles are compared with (default: auto)")
    parser.add_argument("--truth", type=common.whole(1), metavar="N",
                        help="also tell how much of the attention of N tokens was really read")
    _add_compare(parser)


def _add_needle(parser: argparse.ArgumentParser) -> None:
    from ..eval.needle import KINDS

    parser.add_argument("--text", metavar="FILE", help="text to hide facts in (default: Python's own standard library)")
    parser.add_argument("--lengths", type=common.counts(512), metavar="N,N", help=f"tokens {_USUAL_HELP}")
    parser.add_argument("--depths", type=common.checked(_depths), default=[0.1, 0.3, 0.5, 0.7, 0.9], metavar="D,D",
                        help="places of the facts, 0 to 1 (default: 0.1,0.3,0.5,0.7,0.9)")
    parser.add_argument("--kinds", type=common.checked(_names(KINDS)), default=["single"], metavar="KIND,KIND",
                        help=f"{', '.join(KINDS)} (default: single)")
    parser.add_argument("--seed", type=common.whole(0), default=0, metavar="S", help="chooses names and numbers (default: %(default)s)")
    _add_compare(parser)


def _add_recall(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--text", metavar="FILE", help="text to attend (default: Python's own standard library)")
    parser.add_argument("--context", type=common.whole(2048), metavar="N", help=f"tokens {_USUAL_HELP}")
    parser.add_argument("--queries", type=common.whole(1), default=16, metavar="N", help="positions to look from (default: %(default)s)")
    parser.add_argument("--budget", type=common.whole(16), metavar="N", help="tokens to choose (default: the profile's)")
    _add_selectors(parser)


def _add_selectors(parser: argparse.ArgumentParser) -> None:
    known = tuple(name for name in SELECTORS if name != "auto")
    parser.add_argument("--selectors", type=common.checked(_names(known)), metavar="NAME,NAME",
                        help=f"of {', '.join(known)} (default: all that the model allows)")


def _add_curve(parser: argparse.ArgumentParser) -> None:
    _add_text(parser, 128)
    _add_selectors(parser)
    parser.add_argument("--budgets", type=common.counts(16), default=[512, 1024, 2048], metavar="N,N",
                        help="(default: 512,1024,2048)")
    parser.add_argument("--plot", metavar="FILE", help="also draw quality against speed and bytes, as .svg, .png or .pdf")


def _open(args: argparse.Namespace) -> Model:
    args.chosen = as_profile(args.profile)
    return common.open_model(args)


def _usual(args: argparse.Namespace, model: Model, room: int) -> int:
    """Tokens to measure with where nobody says, so that `room` more fit; a model that is too short for that is told by name."""
    trained = model.info.context_length
    return _USUAL if args.beyond_trained or trained <= room else min(_USUAL, trained - room)


def _profiles(args: argparse.Namespace, model: Model, against_kv: str = "auto") -> dict[str, Profile]:
    """The profiles to compare with dense attention, by name. Dense attention over another key-value format is one of them."""
    formats = {format_of(kv, PRESETS["exact"], model.calibrated, model.info.dtype) for kv in (args.kv, against_kv)}
    same = args.profile == "exact" and len(formats) == 1
    named = ({} if same else {args.profile: args.chosen}) | {name: as_profile(name) for name in args.compare}
    return named or {"balanced": PRESETS["balanced"]}


def _texts(args: argparse.Namespace, tokens: int) -> dict[str, str]:
    from ..eval.forced import library_text

    return {name: text_content(name) for name in args.text} or {"standard library": library_text(8 * tokens)}


def _print(args: argparse.Namespace, result: dict[str, Any], table: Callable[[dict[str, Any]], str]) -> int:
    common.write(json.dumps(_finite(result)) + "\n" if args.json else table(result))
    return 0


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinities."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


# ---- ppl and curve ----------------------------------------------------------------------------------------------


def _ppl(args: argparse.Namespace) -> int:
    from ..eval.ppl import perplexity

    texts = _texts(args, max(args.context or [_USUAL]) + args.tokens + 1)
    with _open(args) as model, progress.bar("evaluating", "run") as report:
        contexts = args.context or [_usual(args, model, args.tokens)]
        result = perplexity(model, texts, _profiles(args, model, args.against_kv), contexts=contexts, tokens=args.tokens,
                            truth=_truth(args, model), parts=args.parts, against_kv=args.against_kv,
                            beyond_trained=args.beyond_trained, report=report)
    return _print(args, result, _ppl_table)


def _truth(args: argparse.Namespace, model: Model) -> Truth | None:
    from ..eval.recall import Truth
    from ..tools.calibrate import attention_scale

    return Truth(attention_scale(model), args.truth) if args.truth else None


def _ppl_table(result: dict[str, Any]) -> str:
    rows = [_measured(name, row) for name, row in result["profiles"].items()]
    return _heading(result, "profile") + "".join(rows)


def _heading(result: dict[str, Any], first: str) -> str:
    dense = result["dense"]
    return (f"{len(result['texts'])} text(s), {result['tokens']} tokens after {', '.join(map(str, result['contexts']))}; "
            f"dense: perplexity {dense['perplexity']:.4f}, {1 / dense['seconds_per_token']:.1f} tok/s\n"
            f"{first:20}{'KL':>9}{'95 % interval':>19}{'p95':>9}{'loss':>9}{'same top':>10}{'perplexity':>12}{'covered':>9}"
            f"{'true':>8}"
            f"{'attended':>10}{'MB read':>9}{'tok/s':>8}\n")


def _measured(name: str, row: dict[str, Any]) -> str:
    low, high = row["kl_interval"]
    return (f"{name:20}{row['kl_mean']:9.5f}{f'{low:.5f}-{high:.5f}':>19}{row['kl_p95']:9.4f}{row['logprob_loss']:9.4f}"
            f"{row['top1_agreement']:10.3f}{row['perplexity']:12.4f}{_share(row['covered_estimated']):>9}"
            f"{_share(row['covered_true']):>8}{row['attended_tokens']:10.0f}"
            f"{row['bytes_read_per_token'] / 1e6:9.2f}{1 / row['seconds_per_token']:8.1f}\n")


def _share(value: float) -> str:
    return f"{value:.4f}" if math.isfinite(value) else "-"


def _curve(args: argparse.Namespace) -> int:
    from ..eval.curve import curve

    _check_plot(args)
    texts = _texts(args, max(args.context or [_USUAL]) + args.tokens + 1)
    with _open(args) as model, progress.bar("evaluating", "run") as report:
        contexts = args.context or [_usual(args, model, args.tokens)]
        result = curve(model, texts, _sparse(args), selectors=args.selectors or _usable(model), budgets=args.budgets, contexts=contexts,
                       tokens=args.tokens, beyond_trained=args.beyond_trained, report=report)
    code = _print(args, result, _curve_table)
    if args.plot is not None:
        from ..eval import plot

        with common.output_file(args.plot, sources=(args.model, *args.text)) as file:
            plot.draw(result, args.plot, file)
    return code


def _sparse(args: argparse.Namespace) -> Profile:
    """What selectors and budgets are put into."""
    chosen: Profile = args.chosen
    return chosen if chosen.mode == "sparse" else PRESETS["balanced"]


def _usable(model: Model) -> list[str]:
    from ..eval.curve import CALIBRATED

    return [name for name in SELECTORS if name != "auto" and (model.calibrated or name not in CALIBRATED)]


def _check_plot(args: argparse.Namespace) -> None:
    if args.plot is not None:
        picture.check(args.plot)
        common.check_output(args.plot, sources=(args.model, *args.text))


def _curve_table(result: dict[str, Any]) -> str:
    return _heading(result, "selector, budget") + "".join(_measured(f"{row['selector']} {row['budget']}", row) for row in result["points"])


# ---- needle -----------------------------------------------------------------------------------------------------


def _needle(args: argparse.Namespace) -> int:
    from ..eval.forced import library_text
    from ..eval.needle import ROOM, retrieve

    text = library_text(8 * max(args.lengths or [_USUAL])) if args.text is None else text_content(args.text)
    with _open(args) as model, progress.bar("evaluating", "prompt") as report:
        lengths = args.lengths or [_usual(args, model, ROOM)]
        result = retrieve(model, text, _profiles(args, model), lengths=lengths, depths=args.depths, kinds=args.kinds, seed=args.seed,
                          beyond_trained=args.beyond_trained, report=report)
    return _print(args, result, _needle_table)


def _needle_table(result: dict[str, Any]) -> str:
    names = list(result["summary"])
    lines = [f"{'kind':11}{'length':>8}{'depth':>7}" + "".join(f"{name:>16}" for name in names)]
    for case in result["cases"]:
        found = "".join(f"{case[name]['logprob']:>12.3f} {'yes' if case[name]['found'] else ' no'}" for name in names)
        lines.append(f"{case['kind']:11}{case['length']:>8}{case['depth']:>7.2f}{found}")
    for name, row in result["summary"].items():
        lines.append(f"{name}: found {row['found']} of {row['of']}; of the {row['dense_found']} that dense finds, {row['found_of_dense']}; "
                     f"log-probability lost {row['logprob_loss']:.4f}")
    return "\n".join(lines) + "\n"


# ---- recall -----------------------------------------------------------------------------------------------------


def _recall(args: argparse.Namespace) -> int:
    from ..eval.forced import library_text, text_ids
    from ..eval.recall import recall
    from ..tools.calibrate import attention_scale

    text = library_text(8 * (args.context or _USUAL)) if args.text is None else text_content(args.text)
    with _open(args) as model, progress.bar("evaluating", "selector") as report:
        ids = text_ids(model, text, args.context or _usual(args, model, 0), args.text or "the default text")
        base = replace(_sparse(args), dense_below=0)
        base = base if args.budget is None else replace(base, budget=args.budget)
        profiles = {name: replace(base, selector=name) for name in args.selectors or _usable(model)}
        result = recall(model, ids, attention_scale(model), profiles, queries=args.queries, beyond_trained=args.beyond_trained,
                        report=report)
    return _print(args, result | {"budget": base.budget}, _recall_table)


def _recall_table(result: dict[str, Any]) -> str:
    names = list(result["mean"])
    lines = [f"share of the attention that a budget of {result['budget']} tokens reads of {result['tokens']}, sink and window included; "
             "oracle: as many of the best slices", "layer " + "".join(f"{name:>10}{'oracle':>8}" for name in names)]
    rows = [(str(layer["layer"]), layer["mean"]) for layer in result["layers"]] + [("mean", result["mean"])]
    lines += [f"{label:<6}" + "".join(f"{mean[name]['recall']:10.4f}{mean[name]['oracle']:8.4f}" for name in names) for label, mean in rows]
    return "\n".join(lines) + "\n"
