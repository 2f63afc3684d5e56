"""Noise that depends on a seed, a position and a token id only, and the choice made with it.

Counters instead of a generator's state: whatever else is in the batch, on whichever instance and
attempt a token is chosen, its noise is the same. No logits are changed here.

The choice is a race (the Gumbel-max trick): token i with weight w_i arrives at E_i / w_i, where
E_i = -log(1 - u_i) is exponential, and the first to arrive wins, with probability w_i / sum(w).
The uniform u_i = (bits_i + 1/2) / 2**32 is made of 32 bits that `noise_bits` hashes with integers
alone, so every device gets the same ones. Probabilities below 1e-9 are not resolved.
"""

from collections.abc import Sequence

import torch

_MASK_64 = 2**64 - 1
_NO_SIGN = 0x7FFFFFFF

_LOG_WEIGHT_MIN = -64.0
"""Far below what 32 bits of noise can lift to a win."""

_SLACK = 1 + 1e-4
"""Far above the rounding of fp32 in the first look, so that the winner is among those kept."""


def noise_key(seed: int, position: int) -> int:
    """64 bits that name the noise of one token: splitmix64 over the seed, then the position."""
    return _mix((_mix(seed & _MASK_64) + position) & _MASK_64)


def noise_bits(keys: Sequence[int], token_ids: torch.Tensor) -> torch.Tensor:
    """(keys, int32 token ids) int32: 32 uniform bits, which differ between a key's tokens.

    The low half of a key is where its count of token ids starts, the high half enters between the
    two rounds of a 32-bit finalizer (the constants are those of Wellons' `lowbias32`).
    """
    signed = [key - 2**64 if key >> 63 else key for key in keys]
    halves = torch.tensor(signed, device=token_ids.device).view(torch.int32).view(-1, 2, 1)
    # Shifts of int32 drag the sign along: the masks drop it. Products wrap.
    bits = token_ids + halves[:, 0]
    bits ^= (bits >> 16).bitwise_and_(0xFFFF)
    bits *= 0x21F0AAAD
    bits ^= (bits >> 15).bitwise_and_(0x1FFFF)
    bits ^= halves[:, 1]
    bits *= 0x735A2D97
    bits ^= (bits >> 15).bitwise_and_(0x1FFFF)
    return bits


def race(log_weights: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """(rows, 1) the column that wins: `log_weights` are fp32 with maximum 0, `bits` their noise.

    Arrivals are compared in float64. Of equal ones the first wins.
    """
    # Logarithms in float64 for a whole vocabulary are slow, and few tokens can win. u < E bounds
    # every arrival from below; who is first by that bound really arrives at some time, and only
    # those whose bound is not later can be faster. 31 bits are enough for a bound, and so is too
    # high a weight: exp is slow where it underflows.
    weights = log_weights.clamp(min=_LOG_WEIGHT_MIN).exp_()
    bounds = (bits & _NO_SIGN).float().add_(0.25).div_(weights)
    winners = bounds.argmin(dim=1, keepdim=True)
    scores = _scores(log_weights.gather(1, winners), bits.gather(1, winners))
    limits = scores.neg_().exp_().mul_(2**31 * _SLACK)
    bounds.scatter_(1, winners, torch.inf)
    close = (bounds.amin(dim=1) <= limits.squeeze(1)).nonzero().flatten()
    if len(close):
        contenders = bounds[close] <= limits[close]
        contenders.scatter_(1, winners[close], True)
        winners[close] = _first(log_weights[close], bits[close], contenders)
    return winners


def _mix(state: int) -> int:
    """One step of splitmix64."""
    state = (state + 0x9E3779B97F4A7C15) & _MASK_64
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return state ^ (state >> 31)


def _first(log_weights: torch.Tensor, bits: torch.Tensor, contenders: torch.Tensor) -> torch.Tensor:
    """(rows, 1) the contender of each row that arrives first."""
    rows, columns = contenders.nonzero(as_tuple=True)
    scores = _scores(log_weights[rows, columns], bits[rows, columns])
    best = scores.new_full((len(bits),), -torch.inf).scatter_reduce_(0, rows, scores, "amax")
    is_best = scores == best[rows]
    nobody = columns.new_full((len(bits),), bits.shape[1])
    return nobody.scatter_reduce_(0, rows[is_best], columns[is_best], "amin").unsqueeze(1)


def _scores(log_weights: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """Minus the logarithm of the arrival, in float64: the log-weight plus Gumbel noise."""
    # The sign bit stands last, so that the other 31 alone are a bound from below.
    counts = (bits & _NO_SIGN).double().mul_(2).add_(bits < 0)
    return log_weights.double() - (counts.add_(0.5).mul_(-(2.0**-32)).log1p_().neg_()).log_()
