"""The errors iclperm raises: one small tree, every message one line naming the wrong value and the remedy."""


class IclpermError(Exception):
    """Base of every error that iclperm raises on purpose."""


class ConfigError(IclpermError):
    """A study's configuration is invalid or contradicts itself."""


class DataError(IclpermError):
    """A dataset, a score table or another input array is missing, malformed or does not fit."""


class ModelError(IclpermError):
    """A model cannot be loaded or its architecture is not supported."""


class TokenizationError(IclpermError):
    """A prompt or a label does not tokenise the way the scorer needs."""


class RequestError(IclpermError, ValueError):
    """A call passed an argument of the wrong shape, type or range."""


class PlanError(IclpermError):
    """A study's work cannot be laid out within the limits given."""


class OutOfMemory(IclpermError):
    """Memory ran out, and smaller packs are not possible or might change results."""


class SelfCheckError(IclpermError):
    """The fast path disagrees with the reference beyond the tolerance."""


class RunError(IclpermError):
    """A run directory is locked, incomplete or belongs to another study."""


def printable(text: str) -> str:
    """Text that cannot steer a terminal: control characters other than line breaks and tabs are escaped."""
    return "".join(sign if sign.isprintable() or sign in "\n\t" else repr(sign)[1:-1] for sign in text)
