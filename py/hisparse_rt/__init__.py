# SPDX-License-Identifier: Apache-2.0
"""hisparse_rt: LLaMA-family models in a C runtime.

    import hisparse_rt as hs

    model = hs.load("SmolLM2-135M-Instruct.q8.hsr")
    print(model.chat("What is the capital of France?"))
    for piece in hs.generate(model, "Once upon a time", stream=True, temperature=0.7, seed=1):
        print(piece, end="", flush=True)
"""
from ._library import __version__
from .aio import AsyncStream
from .conversation import Conversation
from .errors import (
    BusyError,
    ContextError,
    FileError,
    FileMissingError,
    ForkedError,
    FormatError,
    HisparseError,
    InternalError,
    InvalidError,
    NonFiniteError,
    NoSpaceError,
    OutOfMemoryError,
    StateError,
    TemplateError,
    TokenError,
    TokenizerError,
    UnsupportedError,
    VersionError,
    WorkCancelledError,
)
from .generate import generate
from .load import load
from .model import EngineStats, Model, ModelInfo, PrefetchStats
from .plan import Plan, plan
from .request import Sampling
from .result import Result, TokenLogprob
from .session import Session, SessionStats
from .stream import Stream

__all__ = [
    "AsyncStream", "BusyError", "ContextError", "Conversation", "EngineStats", "FileError", "FileMissingError", "ForkedError",
    "FormatError", "HisparseError", "InternalError", "InvalidError", "Model", "ModelInfo", "NoSpaceError", "NonFiniteError",
    "OutOfMemoryError", "Plan", "PrefetchStats", "Result", "Sampling", "Session", "SessionStats", "StateError", "Stream",
    "TemplateError", "TokenError", "TokenLogprob", "TokenizerError", "UnsupportedError", "VersionError", "WorkCancelledError",
    "__version__", "generate", "load", "plan",
]
