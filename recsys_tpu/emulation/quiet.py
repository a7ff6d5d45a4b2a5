"""Start-up without chatter: what says nothing to the user is filtered, everything else is kept."""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

_CHATTER = re.compile(
    "|".join(
        (
            r"^WARNING: All log messages before absl::InitializeLog\(\) is called",
            r"^I\d{4} ",  # absl INFO
            r"TORCH_TPU_ALLOW_LEGACY_DEVICE_APIS environment variable is an experimental feature",
            r"^Successfully renamed PrivateUse1 backend to",
            r"^Registered Python module for 'tpu'",
            r"^Device type: tpu, Device index",
            r"^Initializing TPU distributed runtime",
        )
    )
)


def set_log_level() -> None:
    """Keep XLA's and torch_tpu's warnings and errors, not their INFO lines.

    TF_CPP_MIN_LOG_LEVEL=0 in the environment brings the INFO lines back.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")


def filter_warnings() -> None:
    """Ignore torch_tpu's notes on a chip's performance and on experimental interfaces.

    Its `.item()` also reads `.grad` of every tensor, and torch warns of that as if the user had; the place
    in the text tells the two apart.
    """
    warnings.filterwarnings("ignore", message="<TorchTpu/Performance/")
    warnings.filterwarnings("ignore", message="<TorchTpu/ApiStage/ExperimentalApi/>")
    warnings.filterwarnings(
        "ignore", message=r"(?s)The \.grad attribute of a Tensor that is not.*torch_tpu_pypi"
    )


@contextmanager
def startup() -> Iterator[None]:
    """Hold back what is written to stderr meanwhile, then pass on every line that is no chatter.

    If the body raises, everything is passed on.
    """
    python_text = io.StringIO()
    failed = True
    with tempfile.TemporaryFile() as held:
        sys.stderr.flush()
        saved = os.dup(2)
        os.dup2(held.fileno(), 2)
        try:
            with contextlib.redirect_stderr(python_text):
                yield
            failed = False
        finally:
            os.dup2(saved, 2)
            os.close(saved)
            held.seek(0)
            text = held.read().decode(errors="replace") + python_text.getvalue()
            for line in text.splitlines(keepends=True):
                if failed or not _CHATTER.search(line):
                    sys.stderr.write(line)
