"""Every error this product raises on purpose, as one tree.

SwarmError
├── OurFault                      something on this machine; the operator can mend it
│   ├── ConfigError               a config key, value, path or profile is wrong            exit code 2
│   ├── KeyFileError              the identity key is missing, malformed or open to others exit code 2
│   ├── CharterError              the local charter is invalid or its signature is bad     exit code 2
│   ├── ModelError                a policy folder cannot be loaded                         exit code 2
│   ├── SandboxError              the scoring sandbox cannot be started or is too weak
│   ├── UnstableError             updates had to be rolled back again and again
│   ├── TransportError            the network stack of this node is down
│   │   ├── AddressError          an address cannot be parsed, bound or reached            exit code 2
│   │   └── DeadlineError         a wait ran past its deadline
│   └── LocalProtocolError        we were about to send what the protocol forbids (our bug)
└── RemoteProtocolError           a peer sent what the protocol forbids; counted, never fatal
    ├── DecodeError               the bytes are not canonical msgpack of the expected type, or nest too deep
    ├── LimitError                a size, count or rate is above its cap
    ├── SignatureError            signature, sender, domain, topic or swarm do not fit
    ├── FreshnessError            created or expires outside the accepted range
    ├── ReplayError               the same (sender, sequence) was seen before
    └── VersionError              the peer speaks another protocol version

Messages carry the offending value and what to do. `RemoteProtocolError.reason` is the short, fixed word that
becomes the counter's label; it never contains a peer's bytes.
"""

from __future__ import annotations

__all__ = [
    "AddressError",
    "CharterError",
    "ConfigError",
    "DeadlineError",
    "DecodeError",
    "FreshnessError",
    "KeyFileError",
    "LimitError",
    "LocalProtocolError",
    "ModelError",
    "OurFault",
    "RemoteProtocolError",
    "ReplayError",
    "SandboxError",
    "SignatureError",
    "SwarmError",
    "TransportError",
    "UnstableError",
    "VersionError",
]


class SwarmError(Exception):
    """Root of every error raised on purpose. `exit_code` is what the command line returns for it."""

    exit_code = 1


class OurFault(SwarmError):
    """Something on this machine; the message says what the operator can do."""


class ConfigError(OurFault):
    """A config key, value, path or profile is wrong."""

    exit_code = 2


class KeyFileError(OurFault):
    """The identity key is missing, malformed or readable by others."""

    exit_code = 2


class CharterError(OurFault):
    """The charter this node was given is invalid or its signature is bad."""

    exit_code = 2


class ModelError(OurFault):
    """A policy folder cannot be loaded."""

    exit_code = 2


class SandboxError(OurFault):
    """The scoring sandbox cannot be started, or is too weak for what the charter asks."""


class UnstableError(OurFault):
    """Updates were rolled back again and again; the message says why and what to change."""


class TransportError(OurFault):
    """The network stack of this node is down or refuses; pending calls fail with it."""


class AddressError(TransportError):
    """An address cannot be parsed, bound or reached."""

    exit_code = 2


class DeadlineError(TransportError):
    """A wait ran past its deadline. `waiting_for` names the wait as `swarm status` shows it."""

    def __init__(self, waiting_for: str, timeout_s: float) -> None:
        super().__init__(f"{waiting_for} did not finish within {timeout_s:g} s")
        self.waiting_for = waiting_for
        self.timeout_s = timeout_s


class LocalProtocolError(OurFault):
    """We were about to send what the protocol forbids: a bug of ours, never a peer's."""


class RemoteProtocolError(SwarmError):
    """A peer sent what the protocol forbids. Caught at the per-connection boundary, counted by `reason`."""

    reason = "protocol"

    def __init__(self, message: str, *, reason: str | None = None) -> None:
        super().__init__(message)
        if reason is not None:
            self.reason = reason


class DecodeError(RemoteProtocolError):
    """The bytes are not the canonical msgpack of the expected record."""

    reason = "decode"


class LimitError(RemoteProtocolError):
    """A size, count or rate is above its cap."""

    reason = "limit"


class SignatureError(RemoteProtocolError):
    """Signature, sender, domain tag, topic or swarm id do not fit together."""

    reason = "signature"


class FreshnessError(RemoteProtocolError):
    """`created_at` or `expires_at` lies outside the accepted range."""

    reason = "freshness"


class ReplayError(RemoteProtocolError):
    """The same (sender, sequence) was accepted before."""

    reason = "replay"


class VersionError(RemoteProtocolError):
    """The peer speaks another protocol version."""

    reason = "version"
