# SPDX-License-Identifier: Apache-2.0
"""bench: prefill and decode speed at several depths, beside other programs and beside what the machine can do."""
from __future__ import annotations

import argparse
import inspect
import json
import os
import platform
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import picture, progress
from ..bench import bounds, ceilings, distance, job, plot, programs, report, together
from ..bench.job import Options, Point
from ..bench.programs import MeasureError, Program
from ..bench.rounds import Limits, Rounds, Samples, failed_entirely
from ..errors import ContextError, FileMissingError
from ..model import EngineStats, Model
from ..plan import plan
from ..profile import Profile, as_profile
from ..profile_index import serving_all
from . import common

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

HELP = "measure prefill and decode speed"

_DEFAULT_DEPTHS = [512, 2048, 8192, 16384, 32768]


# ---- options ----------------------------------------------------------------------------------------------------


def _peers(text: str) -> list[str]:
    names = [part.strip() for part in text.split(",")]
    programs.check_names(names)
    return names


def _peer_python(text: str) -> tuple[str, str]:
    name, equals, python = text.partition("=")
    if not equals or not python:
        raise ValueError(f"{text!r} is not PEER=INTERPRETER, such as openvino=/opt/openvino/bin/python")
    programs.check_names([name])
    return name, python


def add_arguments(parser: argparse.ArgumentParser) -> None:
    common.add_model(parser)
    parser.add_argument("--depths", type=common.counts(1), metavar="N,N",
                        help="tokens already in the session (default: those of 512,2K,8K,16K,32K that the model was trained for)")
    parser.add_argument("--context", type=common.whole(1), metavar="N", help="one depth: the same as --depths N --beyond-trained")
    parser.add_argument("--fill", choices=["synthetic"],
                        help="compute only the first 8192 tokens of a depth and sample the keys and values of the others from them")
    parser.add_argument("--save", metavar="FILE",
                        help="write the session to FILE before it decodes: one depth, by default one round without limit")
    parser.add_argument("--restore", metavar="FILE", help="begin with a saved session in place of a prompt; its length is the depth")
    parser.add_argument("--decode-tokens", type=common.whole(2), default=32, metavar="N",
                        help="tokens to decode at each depth, at least 2 (default: %(default)s)")
    parser.add_argument("--batch", type=common.whole(2, 1024), metavar="N", help="also decode with N sessions at a time")
    parser.add_argument("--chunk", type=common.whole(1, 4096), default=512, metavar="N",
                        help="prompt tokens per step (default: %(default)s)")
    parser.add_argument("--text", metavar="FILE", help="text to use as the prompt (default: Python's own standard library)")
    parser.add_argument("--beyond-trained", action="store_true", help="allow depths above the length the model was trained for")
    parser.add_argument("--kl", action="store_true",
                        help="put the distance of sparse profiles to dense attention beside their speed: the KL of some tokens of a "
                             "text after 24K, or what the model was trained for; computing that prompt takes a while")
    _add_together(parser)
    _add_rounds(parser)
    _add_peers(parser)
    group = parser.add_argument_group("output")
    group.add_argument("--json", metavar="FILE", help="also write the results to FILE; - is standard output")
    group.add_argument("--plot", metavar="FILE", help="also draw the results, as .svg, .png or .pdf")
    common.add_engine(parser)
    parser.set_defaults(usage_error=parser.error)


def _add_together(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("in turns")
    group.add_argument("--together", action="store_true",
                       help="open the sessions of all depths (and the one of --restore) in one process, and let them decode in turns")
    group.add_argument("--compare", metavar="NAME|FILE", action="append", default=[],
                       help="another profile to decode under, from the very same sessions; may be given several times; implies --together")


def _add_rounds(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("time")
    group.add_argument("--repeats", type=common.whole(1), metavar="N",
                       help="rounds of measurements, or of turns; medians are reported (default: 3, with --save 1)")
    group.add_argument("--limit", type=common.real(0, above=True), metavar="SECONDS",
                       help="leave out a measurement that takes longer (default: 300, with --save or --together none)")
    group.add_argument("--budget", type=common.real(0, above=True), metavar="SECONDS",
                       help="end with what was measured by then (default: none)")


def _add_peers(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("other programs", "They run in turn with ours, on the same prompt and with as many threads. One that "
                                                        "is not installed is left out.")
    group.add_argument("--peers", type=common.checked(_peers), default=[], metavar="NAME,NAME", help=" or ".join(programs.PEERS))
    group.add_argument("--peer-model", metavar="GGUF", help="the same weights for the other programs")
    group.add_argument("--peer-python", type=common.checked(_peer_python), action="append", default=[], metavar="NAME=PATH",
                       help="interpreter of the environment that has a program (default: this one); may be given several times")


# ---- the command ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Setting:
    """What the model file tells, and the options of all measurements."""

    facts: dict[str, Any]
    shape: bounds.Shape
    stats: EngineStats
    source: str
    ids: npt.NDArray[np.int32]
    depths: list[int]
    restored: int | None
    """Tokens in the file of --restore."""
    options: Options
    kl: dict[str, Any] | None
    """Of --kl."""


def run(args: argparse.Namespace) -> int:
    pythons = _check(args)
    args.repeats = args.repeats or (1 if args.save else 3)
    setting = _setting(args)
    facts, stats = setting.facts, setting.stats
    common.say(f"{facts['arch']} {facts['dtype']}, {facts['parameters'] / 1e6:.0f}M parameters; {stats.isa}, {stats.n_threads} threads; "
               f"median of {args.repeats}; load average {facts['load_average'][0]:.1f}")
    everything, table = _measure_together(args, setting) if args.together else _measure_apart(args, setting, pythons)
    everything["kl"] = setting.kl
    facts["load_average"].append(_load_average())
    _write(args, facts | {"isa": stats.isa, "threads": stats.n_threads} | everything, table)
    return 0


def _setting(args: argparse.Namespace) -> _Setting:
    with _open(args) as model:
        stats, session = model.stats(), {"beyond_trained": args.beyond_trained}
        if args.together:
            session |= serving_all(_profiles(args), model.calibrated)
        restored = _saved_length(model, args) if args.restore else None
        depths = _fitting(model, args) if args.depths or restored is None else []
        deepest = max([*depths, restored or 0])
        n_ids = min(deepest, job.COMPUTED_TOKENS) if args.fill or not depths else deepest
        return _Setting(
            facts=_facts(model, args), shape=bounds.shape_of(model), stats=stats, source=os.fsdecode(model.file),
            ids=job.prompt(model, n_ids + 1, args.text), depths=depths, restored=restored,
            options=Options(args.decode_tokens, stats.n_threads, _engine(args), session, fill=args.fill is not None,
                            save=_absolute(args.save), restore=_absolute(args.restore)),
            kl=_distances(model, args) if args.kl else None)


def _distances(model: Model, args: argparse.Namespace) -> dict[str, Any]:
    with progress.bar("comparing with dense attention", "run") as shown:
        return distance.measure(model, _profiles(args), args.text, shown)


def _measure_apart(args: argparse.Namespace, setting: _Setting, pythons: dict[str, str]) -> tuple[dict[str, Any], str]:
    """Each depth in processes of its own, ours in turn with other programs. Returns the report and its table."""
    stats, options, shape = setting.stats, setting.options, setting.shape
    depths = setting.depths if setting.restored is None else [setting.restored]
    points = [Point(depth, batch) for depth in depths for batch in (1, args.batch) if batch]
    ours, peers = programs.ours(setting.source), _find_peers(args, pythons)
    machine = _ceilings(stats.n_threads, bounds.level(stats.isa, shape.dtype))

    def measure(program: Program, point: Point, seconds: float | None) -> dict[str, Any]:
        if program is ours and not args.restore:
            _check_room(args, setting.source, point)
        _show(f"{program.name}, {point}{', restoring' if options.restore else ''} ...")
        return program.measure(job.make(program.model, setting.ids, point, options), seconds)

    def after(point: Point, samples: Samples) -> None:
        n_bytes = report.step_bytes(shape, samples, point, options)
        if machine is not None and n_bytes is not None:
            machine.measure(n_bytes)

    samples = Rounds([ours, *peers], points, args.repeats, _limits(args), measure, common.say, after).run()
    reason = failed_entirely(samples)
    if reason is not None:
        raise MeasureError(f"nothing was measured: {reason}")
    found = report.rows(shape, samples, points, [peer.name for peer in peers], options, machine)
    distance.beside(found, setting.kl, args.profile)
    return {
        "version": ours.facts["version"], "peers": {peer.name: peer.facts for peer in peers},
        "peer_model": programs.model_facts(args.peer_model) if peers else None, "ceilings": machine.facts() if machine else None,
        "skipped": samples.skipped, "rows": found,
    }, report.table(found, {peer.name: peer.facts["kv"] for peer in peers})


def _measure_together(args: argparse.Namespace, setting: _Setting) -> tuple[dict[str, Any], str]:
    """All depths and profiles in one process. Returns the report and its table."""
    ours, batches = programs.ours(setting.source), [1, *([args.batch] if args.batch else [])]
    for depth in setting.depths:
        _check_room(args, setting.source, Point(depth, max(batches)))
    turns = job.Turns(args.repeats, list(_profiles(args)), batches)
    limits = [limit for limit in (args.limit, args.budget) if limit is not None]
    answer = ours.measure(job.make_turns(ours.model, setting.ids, setting.depths, setting.restored, turns, setting.options),
                          min(limits, default=None))
    found = together.rows(answer, setting.shape.dtype)
    distance.beside(found, setting.kl)
    return {"version": ours.facts["version"], "rows": found} | {
        name: answer[name] for name in ("opened", "engine", "rss_peak_bytes")}, together.table(found)


def _profiles(args: argparse.Namespace) -> dict[str, Profile]:
    """What decodes in turns, by name."""
    return {name: as_profile(name) for name in (args.profile, *args.compare)}


def _limits(args: argparse.Namespace) -> Limits:
    return Limits(args.limit or (None if args.save else 300.0), args.budget)


def _absolute(name: str | None) -> str | None:
    return None if name is None else os.path.abspath(name)


def _saved_length(model: Model, args: argparse.Namespace) -> int:
    """Tokens of the session in --restore FILE, which is found damaged, or of another model, before anything is measured."""
    kv = None if args.kv == "auto" else args.kv  # a format that was asked for and is not the one of the file is refused
    trained, more = model.info.context_length, _decoded(args)
    room = None if args.beyond_trained else max(trained - more, 1)  # is refused before the file is read
    try:
        with (
            progress.bar(f"reading {args.restore}", "B") as report,
            model.restore(args.restore, kv=kv, context=room, beyond_trained=args.beyond_trained, progress=report) as session,
        ):
            return session.n_tokens
    except ContextError as error:
        raise ContextError(f"{error}, and {more} more pass the {trained} the model was trained for; --beyond-trained allows it") from None


def _show(text: str) -> None:
    """What is going on, until the next line takes its place. Only where a person can see it."""
    if sys.stderr is not None and sys.stderr.isatty():
        print(text, end="\r", file=sys.stderr, flush=True)


def _check(args: argparse.Namespace) -> dict[str, str]:
    """What can be wrong is told before a model is opened, or converted. Returns the interpreters of peers."""
    pythons = dict(args.peer_python)
    if args.context is not None and args.depths is not None:
        args.usage_error("give --context or --depths, not both")
    args.together = args.together or bool(args.compare)
    if args.together and (args.peers or args.save or args.plot):
        args.usage_error("--together and --compare are for our own program: they go without --peers, --save and --plot")
    if len({args.profile, *args.compare}) < 1 + len(args.compare):
        args.usage_error("--compare names a profile that is measured already")
    if args.context is not None:
        args.depths, args.beyond_trained = [args.context], True
    if args.fill and args.peers:
        args.usage_error("--fill is for our own program: the others would have to compute the whole context")
    beside = args.together and args.depths  # a saved session beside others
    if args.restore and (args.peers or args.save or not beside and (args.fill or args.depths or args.text)):
        args.usage_error("--restore takes the place of a prompt: it goes without --peers and --save, and but for --together with --depths, "
                         "without --depths, --context, --fill and --text")
    if args.save and (len(args.depths or []) != 1 or args.batch):
        args.usage_error("--save writes one session: give it one depth, and no --batch")
    if args.peers and args.peer_model is None:
        args.usage_error("--peers needs --peer-model: a GGUF file of the same weights")
    for name, python in pythons.items():
        if name not in args.peers:
            args.usage_error(f"--peer-python names {name}, which --peers does not")
        programs.check_python(python)
    if args.peer_model is not None and not os.path.isfile(args.peer_model):
        raise FileMissingError(f"{args.peer_model}: no such file", sys_code=2)
    if args.plot is not None:
        picture.check(args.plot)
    for name, stdout in ((args.json, True), (args.plot, False), (args.save, False)):
        if name is not None:
            common.check_output(name, sources=_sources(args), stdout=stdout)
    return pythons


def _sources(args: argparse.Namespace) -> tuple[str, ...]:
    return tuple(name for name in (args.model, args.peer_model, args.text) if name is not None)


def _engine(args: argparse.Namespace) -> dict[str, Any]:
    """Those options that are options of `load`, for the processes that measure; but for threads, of which all programs get as many."""
    from ..load import load

    known = inspect.signature(load).parameters
    return {name: value for name, value in vars(args).items() if name in known and name != "threads"}


def _open(args: argparse.Namespace) -> Model:
    from ..load import load

    return load(args.model, threads=args.threads, log=common.spoken_log(), **_engine(args))


def _fitting(model: Model, args: argparse.Namespace) -> list[int]:
    """The depths asked for; ContextError if one passes the trained length. Of the default ones, those that do not."""
    trained = model.info.context_length
    depths: list[int] = sorted(set(args.depths or _DEFAULT_DEPTHS))
    if args.beyond_trained or max(depths) + _decoded(args) <= trained:
        return depths
    if args.depths:
        raise ContextError(f"depth {max(depths)} and {_decoded(args)} tokens more pass the {trained} tokens the model was trained for; "
                           "--beyond-trained allows it")
    fitting = [depth for depth in depths if depth + _decoded(args) <= trained]
    if not fitting:
        raise ContextError(f"the model was trained for {trained} tokens: give --depths below that, or --beyond-trained")
    common.say(f"depths above {max(fitting)} are left out: the model was trained for {trained} tokens (--beyond-trained)")
    return fitting


def _decoded(args: argparse.Namespace) -> int:
    """Tokens that a session may hold beyond its depth."""
    return args.repeats * (args.decode_tokens + 1) + 1 if args.together else args.decode_tokens + 1


def _check_room(args: argparse.Namespace, model: str, point: Point) -> None:
    """MeasureError if its sessions do not fit: told before minutes are spent on filling them."""
    engine = _engine(args)
    kv, profile, calibration = (engine.pop(name) for name in ("kv", "profile", "calibration"))
    found = plan(model, context=point.depth + _decoded(args), sessions=point.batch, beyond_trained=True, kv=kv,
                 profile=0 if profile == "exact" else profile, calibrated=None if calibration is None else bool(calibration),
                 max_sessions=max(256, point.batch), **engine)
    if not found.fits:
        raise MeasureError(f"{point} do not fit: {found.shortage}")


def _find_peers(args: argparse.Namespace, pythons: dict[str, str]) -> list[Program]:
    found = []
    for name in args.peers:
        try:
            found.append(programs.peer(name, os.path.abspath(args.peer_model), pythons.get(name)))
        except MeasureError as error:
            common.say(f"{name} is left out: {error}")
    return found


def _ceilings(threads: int, level: str) -> ceilings.Ceilings | None:
    program = ceilings.find()
    if program is None:
        common.say("bounds are left out: this installation has no program to measure the machine")
        return None
    return ceilings.Ceilings(program, threads, level)


def _facts(model: Model, args: argparse.Namespace) -> dict[str, Any]:
    info = model.info
    return {
        "model": model.path, "name": model.metadata("general.name") or Path(model.path).stem, "arch": info.arch, "dtype": info.dtype,
        "parameters": info.n_params, "options": _engine(args), "repeats": args.repeats, "decode_tokens": args.decode_tokens,
        "cpu": _cpu_name(), "load_average": [_load_average()],
    }


def _load_average() -> float:
    return round(os.getloadavg()[0], 2)


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8", "replace").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def _write(args: argparse.Namespace, everything: dict[str, Any], table: str) -> None:
    text = json.dumps(everything, indent=1) + "\n"
    common.write(text if args.json == "-" else table)
    if args.json not in (None, "-"):
        with common.output_file(args.json, sources=_sources(args)) as file:
            file.write(text.encode())
    if args.plot is not None:
        with common.output_file(args.plot, sources=_sources(args)) as file:
            plot.draw(everything, args.plot, file)
