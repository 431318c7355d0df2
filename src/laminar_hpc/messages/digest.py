"""The digest of a response: made by the replica that generated it, compared when it is stored, when it is
trained on, and by `laminar audit`."""

import hashlib
import struct

from laminar_hpc.messages.data import Trajectory


def digest_of(trajectory: Trajectory) -> str:
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
