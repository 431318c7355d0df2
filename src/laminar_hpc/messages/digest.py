"""The digest of a response: made by the replica that generated it, compared when it is stored, when it is
trained on, and by `laminar audit`."""

import hashlib
import struct
from collections.abc import Sequence
from typing import Protocol

from laminar_hpc.messages.data import Trajectory


class Response(Protocol):
    """Of a trajectory what the digest is made of."""

    @property
    def trajectory_id(self) -> int: ...

    @property
    def response_tokens(self) -> Sequence[int]: ...

    @property
    def logprobs(self) -> Sequence[float]: ...


def digest_of(trajectory: Response) -> str:
    """Half a SHA-256, in hexadecimal, of id (int64), response tokens (int32 each) and behaviour log-probs
    (float64 each), little-endian. Of what was sent by a healthy replica it never fails; tokens beyond int32
    have no digest, which is ""."""
    tokens, logprobs = trajectory.response_tokens, trajectory.logprobs
    try:
        data = struct.pack(f"<q{len(tokens)}i", trajectory.trajectory_id, *tokens)
    except struct.error:
        return ""
    return hashlib.sha256(data + struct.pack(f"<{len(logprobs)}d", *logprobs)).hexdigest()[:32]


def sealed(trajectory: Trajectory) -> Trajectory:
    """With its digest, as its replica sends it."""
    trajectory.digest = digest_of(trajectory)
    return trajectory


def is_intact(trajectory: Trajectory) -> bool:
    """Whether tokens and log-probs are those that the digest was made of."""
    return bool(trajectory.digest) and trajectory.digest == digest_of(trajectory)
