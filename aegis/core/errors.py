"""Three kinds of failure.

1. `UserError`: somebody asked for what cannot be; one line that says what to do. Becomes an HTTP error or exit code 2.
2. Refusals are values (`NoPages`, `NoBlocks`, in `memory`): expected, typed, handled by the caller.
3. `assert` is for bugs of ours.
"""

from __future__ import annotations


class UserError(Exception):
    """A mistake that a user can cause and mend. `message` is one line; `param` names the offending field, if there is
    one. `reason` is the label under which it is counted, if `code` is not precise enough."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        kind: str = "invalid_request_error",
        retry_after_s: int | None = None,
        reason: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.param = param
        self.code = code
        self.kind = kind
        self.retry_after_s = retry_after_s
        self.reason = reason


class ModelRefused(UserError):
    """A checkpoint that cannot be served; the message says why and names the checkpoint."""

    def __init__(self, message: str, *, status: int = 400) -> None:
        super().__init__(message, status=status, code="model_refused", param="source")


def install_advice(extra: str = "") -> str:
    """The command that brings the packages of an extra of pyproject.toml, or of aegis itself: no index has aegis."""
    return "where aegis was cloned: pip install -e " + (f"'.[{extra}]'" if extra else ".")


class LawBroken(AssertionError):
    """An accounting law does not hold: a bug of ours, never a user's doing."""
