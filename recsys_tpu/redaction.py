"""Takes secrets out of text that leaves a run: logs, error messages, support bundles.

Nothing in a config is a secret, but paths, overrides and environment variables can carry one.  A secret is
known by the name that it is given (``api_key=...``) or by its own form.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

HIDDEN = "[hidden]"
_NAME = (
    r"(?<![A-Za-z0-9])(?:[A-Za-z0-9]+[_.-]+){0,6}"
    r"(?:password|passwd|passphrase|secret|token|(?:api|access|private)[-_]?key|credentials?|authorization)"
    r"(?:[-_][A-Za-z0-9_-]*)?"
)
_RULES: tuple[tuple[re.Pattern[str], str], ...] = (
    (
        re.compile(
            r"-----BEGIN [A-Z ]{0,30}PRIVATE KEY-----.*?(?:-----END [A-Z ]{0,30}PRIVATE KEY-----|\Z)", re.S
        ),
        HIDDEN,
    ),
    # scheme://user:password@host; lengths are bounded here and below, or a long line would take minutes
    (re.compile(r"(?P<keep>\b[a-z][a-z0-9+.-]{0,20}://)[^/\s:@]*:[^/\s@]+@", re.I), rf"\g<keep>{HIDDEN}@"),
    (re.compile(r"(?P<keep>\b(?:bearer|basic)\s+)[A-Za-z0-9._~+/=-]{8,}", re.I), rf"\g<keep>{HIDDEN}"),
    # name=value, name: value, "name": "value"
    (
        re.compile(
            rf"(?P<keep>{_NAME}\\?[\"']?\s*[=:]\s*(?!\\?[\"']?\[hidden\])\\?[\"']?)"
            r"(?!(?:bearer|basic)\s)(?:\\(?![\"'])|[^\s\"',;&}\]\\])+",
            re.I,
        ),
        rf"\g<keep>{HIDDEN}",
    ),
    # the forms of keys of GitHub, Google, Hugging Face, AWS, Slack, and of JSON web tokens
    (
        re.compile(
            r"\b(?:gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|AIza[\w-]{30,}|ya29\.[\w.-]{20,}|hf_[A-Za-z0-9]{20,}"
            r"|AKIA[A-Z0-9]{16}|xox[abpr]-[\w-]{10,}|eyJ[\w-]{10,2000}\.[\w-]{10,2000}\.[\w-]*)"
        ),
        HIDDEN,
    ),
)
# variables that say how a run was started; others are not told
_TOLD = re.compile(
    r"(?:CUDA|FBGEMM|GLOO|JAX|KMP|LIBTPU|LOCAL|MALLOC|MASTER|MKL|NODE|OMP|PJRT|PYTORCH|RECSYS_TPU|TORCH|TORCHELASTIC"
    r"|TORCHINDUCTOR|TPU|XLA)_\w+|RANK|WORLD_SIZE|NNODES|LD_PRELOAD|PYTHONPATH"
)


def redact(text: str) -> str:
    """`text` with secrets replaced by ``[hidden]``."""
    for pattern, replacement in _RULES:
        text = pattern.sub(replacement, text)
    return text


def redact_values(value: Any) -> Any:
    """JSON's values with secrets replaced, those of keys with a secret's name as a whole."""
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, Mapping):
        return {
            key: HIDDEN if re.fullmatch(_NAME, str(key), re.I) else redact_values(inner)
            for key, inner in value.items()
        }
    if isinstance(value, list | tuple):
        return [redact_values(inner) for inner in value]
    return value


def told_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment variables that decide how a run works, without secrets; no others."""
    pairs = (
        redact(f"{name}={value}").split("=", 1)
        for name, value in sorted(environment.items())
        if _TOLD.fullmatch(name)
    )
    return {name: value for name, value in pairs}
